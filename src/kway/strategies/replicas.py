"""Whether the copies of the weights that ranks hold are still one: each rank updates its own.

Equal gradients and equal updates keep them equal to the bit. What a loop, a hook or an optimizer does to them on one
rank alone shows in no loss for a while, and nobody reads the copies of other ranks.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import nn

from kway.comm.group import Group
from kway.errors import ReplicaError
from kway.units import counted

Tensor = torch.Tensor
# As many numbers at a time, of small tensors together: few launches, and 16 MiB beside them.
_PIECE = 1 << 21
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a whole number made of the bits of all tensors and where they stand: a scalar, int64.

    A sum modulo 2^64 of each number's bits times an odd factor of its place, so that any one changed number changes it.
    Does not wait for the device.
    """
    # Two numbers each, where they are complex.
    longest = min(_PIECE, sum(2 * tensor.numel() for tensor in tensors))
    factors = torch.arange(longest, dtype=torch.int64, device=device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, piece in enumerate(_pieces(tensors)):
        # Odd, so that no piece counts less than another.
        total += (piece * factors[: len(piece)]).sum() * (2 * number + 1)
    return total


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bits of all tensors as whole numbers, in vectors of up to ``_PIECE``."""
    open_: dict[int, list[Tensor]] = {}
    for bits in map(_bits, tensors):
        width = bits.element_size()
        for begin in range(0, len(bits), _PIECE):
            part = bits[begin : begin + _PIECE]
            held = open_.setdefault(width, [])
            if held and sum(map(len, held)) + len(part) > _PIECE:
                yield torch.cat(open_.pop(width))
                held = open_.setdefault(width, [])
            held.append(part)
    yield from (torch.cat(held) if len(held) > 1 else held[0] for held in open_.values())


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.detach().resolve_neg().reshape(-1)
    return flat.view(_WHOLE_NUMBERS[flat.element_size()])


def check_replicas(model: nn.Module, group: Group, device: torch.device) -> None:
    """Raise ``ReplicaError`` where parameters differ between the ranks of ``group``. A collective; all ranks raise.

    Raises ``ValueError`` where ranks hold other parameters or buffers than each other. Waits for the device once.
    """
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    shapes = {
        f"{kind} {name!r}": (tuple(tensor.shape), str(tensor.dtype))
        for kind, held in kinds.items()
        for name, tensor in held
    }
    parameters = dict(model.named_parameters())
    own = torch.empty(2, dtype=torch.int64, device=device)
    own[0].fill_(zlib.crc32(repr(shapes).encode()))
    own[1].copy_(checksum([*parameters.values()], device))
    found = group.stack(own).tolist()
    if any(shape != found[0][0] for shape, _ in found):
        _compare_shapes(shapes, group)
    if any(values != found[0][1] for _, values in found):
        _name(parameters, group, device)


def _compare_shapes(shapes: dict[str, tuple[tuple[int, ...], str]], group: Group) -> None:
    for rank, others in enumerate(group.objects(shapes)):
        if others != shapes:
            name = next(n for n in {**shapes, **others} if shapes.get(n) != others.get(n))
            raise ValueError(
                f"{name} is {shapes.get(name)} on rank {group.rank} and {others.get(name)} on rank {rank}: there must "
                "be one of one shape on all ranks"
            )


def _name(parameters: dict[str, nn.Parameter], group: Group, device: torch.device) -> NoReturn:
    """Raise ``ReplicaError`` that names a parameter that differs. A collective."""
    found = group.stack(torch.stack([checksum([value], device) for value in parameters.values()]))
    differ = (found != found[0]).cpu()
    names = [name for name, odd in zip(parameters, differ.any(0).tolist(), strict=True) if odd]
    ranks = [str(rank) for rank, odd in enumerate(differ.any(1).tolist()) if odd]
    more = f" (and {counted(len(names) - 1, 'other parameter')})" if len(names) > 1 else ""
    raise ReplicaError(
        f"parameter {names[0]!r}{more} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} is not what "
        f"rank 0 holds, by up to {_farthest(parameters[names[0]], group):.3g}",
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
