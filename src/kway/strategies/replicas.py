"""Whether the copies of the weights that ranks hold are still one: each rank updates its own.

Equal gradients and equal updates keep them equal to the bit. What a loop, a hook or an optimizer does to them on one
rank alone shows in no loss for a while, and nobody reads the copies of other ranks.
"""

from collections.abc import Iterator

import torch
from torch import nn

from kway.comm.group import Group
from kway.errors import ReplicaError
from kway.units import counted

Tensor = torch.Tensor
# As many numbers at a time: what they are multiplied with is 8 MiB, whatever the size of the largest parameter.
_PIECE = 1 << 20
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return one whole number a tensor, of shape (len(tensors),), made of its bits and where they stand.

    A sum modulo 2^64 of each number's bits times an odd factor of its place, so that any one changed number changes it.
    Does not wait for the device.
    """
    # Two numbers each, where they are complex.
    longest = min(_PIECE, max((2 * tensor.numel() for tensor in tensors), default=0))
    factors = torch.arange(1, 2 * longest, 2, dtype=torch.int64, device=device)
    found = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=device)
        for number, piece in enumerate(_bits(tensor)):
            # Odd, so that no piece counts less than another.
            total = total + (piece * factors[: len(piece)]).sum() * (2 * number + 1)
        found.append(total)
    return torch.stack(found) if found else factors.new_zeros(0)


def _bits(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bits of a tensor as whole numbers, in pieces of one dimension."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.detach().resolve_neg().reshape(-1)
    bits = flat.view(_WHOLE_NUMBERS[flat.element_size()])
    for begin in range(0, len(bits), _PIECE):
        yield bits[begin : begin + _PIECE]


def check_replicas(model: nn.Module, group: Group, device: torch.device) -> None:
    """Raise ``ReplicaError`` where parameters differ between the ranks of ``group``. A collective; all ranks raise."""
    held = dict(model.named_parameters())
    found = group.stack(checksums(list(held.values()), device))
    differ = (found != found[0]).cpu()
    if not bool(differ.any()):
        return
    names = [name for name, odd in zip(held, differ.any(0).tolist(), strict=True) if odd]
    ranks = [str(rank) for rank, odd in enumerate(differ.any(1).tolist()) if odd]
    more = f" (and {counted(len(names) - 1, 'other parameter')})" if len(names) > 1 else ""
    raise ReplicaError(
        f"parameter {names[0]!r}{more} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} is not what "
        f"rank 0 holds, by up to {_farthest(held[names[0]], group):.3g}",
        "every rank holds a copy of the weights, and all copies must change alike",
        "look for what changes weights on one rank only, or with random numbers from a generator that each rank seeds "
        "for itself",
    )


@torch.no_grad()
def _farthest(parameter: Tensor, group: Group) -> float:
    """Return how far the copies of one parameter are from the first rank's. A collective."""
    first = group.broadcast_(parameter.detach().clone().contiguous())
    wide = torch.complex128 if parameter.is_complex() else torch.float64
    own = (parameter.detach().to(wide) - first.to(wide)).abs().max()
    return float(group.stack(own).max())
