"""Whether the copies of the weights that ranks hold are still one: each rank updates its own.

Equal gradients and equal updates keep them equal to the bit. What a loop, a hook or an optimizer does to them on one
rank alone shows in no loss for a while, and nobody reads the copies of other ranks.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from kway.comm.group import Group
from kway.devices import cpu
from kway.errors import ReplicaError
from kway.flat import flat
from kway.units import counted

Tensor = torch.Tensor
# As many words at a time, of small tensors together: few launches, and 48 MiB beside them.
_PIECE = 1 << 21
# Shifts bring high bits down, and odd factors low ones up.
_MIX = ((32, 0x4C_D6_94_4C_5C_C2_0B_6D), (29, 0x2D_98_09_ED_C4_3C_3F_57))
# Odd, so that places stay apart.
_SPREAD = 0x1B_D1_1B_DA_A9_FC_1A_23
# Eight bytes are two words: of a product with a longer one nothing but the lowest bits of a factor would be left.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@torch.no_grad()
def checksum(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a whole number made of the bits of all tensors and where they stand: a scalar, int64.

    Changes of many numbers (all doubled, all negated) do not cancel. Does not wait for the device.
    """
    if device.type != "cpu":
        return mixed(tensors, device)
    found = 0
    for bits in map(_bits, tensors):
        # A view of every second number, say, is flat and yet has gaps.
        held: Any = bits.contiguous().numpy()
        found = zlib.crc32(held, found)
    return torch.tensor(found, dtype=torch.int64)


def mixed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return such a number, computed by the device: the sum modulo 2^64 of all words, each times a factor of its own.

    That is multilinear hashing (Carter and Wegman, 1979): factors that look like random ones of 64 bits leave 32 bits
    by which two different lists of words are told apart. A piece takes two launches.
    """
    pieces = [*_pieces(tensors)]
    if not pieces:
        return torch.zeros((), dtype=torch.int64, device=device)
    factors = _mix(torch.arange(1, max(map(len, pieces)) + 1, dtype=torch.int64, device=device))
    sums = torch.stack([torch.sum(piece * factors[: len(piece)]) for piece in pieces])
    # Odd, so that none of what a sum tells is lost.
    own = _mix(torch.arange(-1, -len(pieces) - 1, -1, dtype=torch.int64, device=device)).bitwise_or_(1)
    return sums.mul_(own).sum()


def _mix(numbers: Tensor) -> Tensor:
    """Overwrite whole numbers that are all different with ones that look random."""
    numbers.mul_(_SPREAD)
    for shift, factor in _MIX:
        numbers.bitwise_xor_(numbers >> shift).mul_(factor)
    return numbers.bitwise_xor_(numbers >> 29)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the words of all tensors, in vectors of up to ``_PIECE``, none of them empty."""
    open_: dict[int, list[Tensor]] = {}
    lengths: dict[int, int] = {}
    for bits in map(_bits, tensors):
        width = bits.element_size()
        parts = [bits] if 0 < len(bits) <= _PIECE else torch.split(bits, _PIECE) if len(bits) else ()
        for part in parts:
            held = open_.setdefault(width, [])
            if held and lengths[width] + part.numel() > _PIECE:
                yield torch.cat(open_.pop(width))
                held = open_.setdefault(width, [])
            lengths[width] = part.numel() + (lengths[width] if held else 0)
            held.append(part)
    yield from (torch.cat(held) if len(held) > 1 else held[0] for held in open_.values())


def _bits(tensor: Tensor) -> Tensor:
    numbers = flat(tensor)
    real = torch.view_as_real(numbers).view(-1) if tensor.is_complex() else numbers
    return real.view(_WORDS[real.element_size()])


def check_replicas(
    model: nn.Module, group: Group, device: torch.device, notes: list[str] | None = None
) -> None:
    """Raise ``ReplicaError`` where parameters differ between the ranks of ``group``. A collective; all ranks raise.

    ``notes``: where devices may round otherwise than each other, parameters that differ by rounding alone become the
    first rank's, and a line in ``notes`` says so; ``None``: they differ by nothing. Raises it as well where ranks hold
    parameters or buffers of other names, shapes or dtypes than each other. Waits for the device once.
    """
    shapes = _shapes(model)
    parameters = dict(model.named_parameters())
    own = torch.empty(2, dtype=torch.int64, device=device)
    own[0].fill_(zlib.crc32(repr(shapes).encode()))
    own[1].copy_(checksum([*parameters.values()], device))
    found = group.stack(own).tolist()
    if any(shape != found[0][0] for shape, _ in found):
        _compare_shapes(shapes, group)
    if any(values != found[0][1] for _, values in found):
        _bring_together(parameters, group, device, notes)


def _shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    return [
        (f"{kind} {name!r}", tuple(tensor.shape), str(tensor.dtype))
        for kind, held in kinds.items()
        for name, tensor in held
    ]


def compare_shapes(model: nn.Module, group: Group) -> None:
    """Raise ``ReplicaError`` where ranks hold parameters or buffers of other names, shapes or dtypes. A collective."""
    _compare_shapes(_shapes(model), group)


def _compare_shapes(shapes: list[tuple[str, tuple[int, ...], str]], group: Group) -> None:
    for rank, others in enumerate(group.objects(shapes)):
        if others == shapes:
            continue
        own, theirs = ({name: rest for name, *rest in held} for held in (shapes, others))
        name = next((n for n in {**own, **theirs} if own.get(n) != theirs.get(n)), None)
        if name is None:
            raise ReplicaError(
                f"ranks {group.rank} and {rank} have the same parameters and buffers in another order",
                "there must be one order on all ranks",
                "register them in the same order everywhere",
            )
        raise ReplicaError(
            f"{name} is {_said(own.get(name))} on rank {group.rank} and {_said(theirs.get(name))} on rank {rank}",
            "there must be one of one shape on all ranks",
            "look for what adds, removes or resizes it on one rank only",
        )


def _said(held: list[Any] | None) -> str:
    return "not there" if held is None else f"of shape {held[0]}, {held[1].removeprefix('torch.')}"


@torch.no_grad()
def _bring_together(
    parameters: dict[str, nn.Parameter], group: Group, device: torch.device, notes: list[str] | None
) -> None:
    """Give all ranks the first one's parameters where that changes no more than rounding does. A collective."""
    found = group.stack(torch.stack([checksum([value], device) for value in parameters.values()]))
    differ = (found != found[0]).cpu()
    names = [name for name, odd in zip(parameters, differ.any(0).tolist(), strict=True) if odd] or [
        *parameters
    ]
    ranks = [str(rank) for rank, odd in enumerate(differ.any(1).tolist()) if odd]
    firsts = [group.broadcast_(parameters[name].detach().clone().contiguous()) for name in names]
    gaps = [_gap(parameters[name], first) for name, first in zip(names, firsts, strict=True)]
    # The same decision on all ranks: by the parameter that is farthest from what rounding may add up to.
    over, gap, number = max(
        (over, gap, -number) for own in group.objects(gaps) for number, (gap, over) in enumerate(own)
    )
    name, more = names[-number], ""
    if len(names) > 1:
        more = f" (and {counted(len(names) - 1, 'other parameter')})"
    text = f"parameter {name!r}{more} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
    if notes is None or over > 1:
        raise ReplicaError(
            f"{text} is not what rank 0 holds, by up to {gap:.3g}",
            "every rank holds a copy of the weights, and all copies must change alike",
            "look for what changes weights on one rank only, or with random numbers from a generator that each rank "
            "seeds for itself",
        )
    for name, first in zip(names, firsts, strict=True):
        parameters[name].copy_(first)
    line = "copies of the weights were brought to the first rank's: ranks' devices round otherwise than each other"
    if not any(known.startswith(line) for known in notes):
        notes.append(f"{line} (first seen in {text}, by up to {gap:.3g})")


def _gap(parameter: Tensor, first: Tensor) -> tuple[float, float]:
    """Return how far a copy is from the first one, and that as a multiple of what rounding may add up to.

    That is half of the digits, of the largest number; of the few that half precision has, all but the last two bits.
    """
    if not parameter.numel():
        return 0.0, 0.0
    wide = torch.complex128 if parameter.is_complex() else torch.float64
    gap = float((parameter.detach().to(wide) - first.to(wide)).abs().max())
    if math.isnan(gap):
        return math.inf, math.inf
    numbers = parameter.is_floating_point() or parameter.is_complex()
    eps = torch.finfo(parameter.dtype).eps if numbers else 0.0
    allowed = min(eps**0.5, 4 * eps) if eps > 1e-4 else eps**0.5
    allowed *= float(first.to(wide).abs().max())
    return gap, gap / allowed if allowed else (math.inf if gap else 0.0)


def rounds_as(device: torch.device) -> str:
    """Return what must be equal for two devices to round alike: versions of torch, and what they compute on."""
    if device.type == "cuda":
        return f"{torch.__version__} {torch.cuda.get_device_name(device)}"
    return f"{torch.__version__} {cpu.model()} {torch.backends.cpu.get_cpu_capability()}"
