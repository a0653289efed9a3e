"""Buffers that a forward pass changes, where a batch is computed in pieces: each piece starts from the step's own.

Pieces are the shards of level bits, or micro-batches. Batch normalisation over shards is not among them (see
``pooled``). What follows from the weights alone, such as the vectors of spectral normalisation or a counter, comes out
the same for every piece, and moves once a step as on a whole batch. What depends on the samples would be another on
every number of devices, or for every size of the pieces.
"""

from dataclasses import dataclass

import torch
from torch import nn

from kway.comm.group import Group
from kway.errors import RefusedError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Piece:
    """What a batch is cut into: its ``name``, why buffers must not follow its samples, and what can be done."""

    name: str
    need: str
    do: str


SHARD = Piece(
    "shard",
    "at exactness bits it would be another on every number of devices",
    "use exactness math, or compute it from what does not depend on the batch",
)
MICRO_BATCH = Piece(
    "micro-batch",
    "at exactness math it must be what the whole batch gives, which no part of it does",
    "use a larger micro_batch or exactness loose, or compute it from what does not depend on the batch",
)


class KeptBuffers:
    """Buffers of ``model`` but those of the layers in ``without``, over the pieces of a batch."""

    def __init__(self, model: nn.Module, without: list[nn.Module], piece: Piece) -> None:
        self._piece = piece
        left_out = {id(module) for module in without}
        self._modules = [
            (name, module)
            for name, module in model.named_modules()
            if id(module) not in left_out and module._buffers
        ]
        self._before: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        self._after: dict[tuple[int, str], Tensor] | None = None

    def forget(self) -> None:
        """Copy all of them when the next step begins, also where they look unchanged."""
        self._before = {}

    def begin(self) -> None:
        """Take the values from which every piece of a step starts. Copies only what changed since the last step."""
        now = {}
        for place, (_, module) in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    known = self._before.get((place, name))
                    same = known is not None and known[0] is buffer and known[1] == buffer._version
                    now[place, name] = known if same and known else (buffer, buffer._version, _copy(buffer))
        self._before, self._after = now, None

    def end_of_piece(self) -> None:
        """Put the step's values back. Raises ``RefusedError`` where two pieces left different values."""
        after = {}
        for place, (_, module) in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                known = self._before.get((place, name))
                if buffer is None or (known and known[0] is buffer and known[1] == buffer._version):
                    continue
                after[place, name] = _copy(buffer)
                if known is None:
                    module._buffers[name] = None
                    continue
                with torch.no_grad():
                    known[0].copy_(known[2])
                module._buffers[name] = known[0]
                self._before[place, name] = (known[0], known[0]._version, known[2])
        if self._after is None:
            self._after = after
        elif name := _different(self._after, after):
            raise RefusedError(
                f"buffer {self._named(name)!r} depends on the samples of a {self._piece.name}",
                self._piece.need,
                self._piece.do,
            )

    def end_of_step(self, group: Group, idle: bool) -> None:
        """Give the buffers the values that the pieces left. ``idle``: some rank may have computed none; then a
        collective, in which it takes the values of the first that did.
        """
        after = self._after
        if idle and group.size > 1 and self._modules:
            found = [held for held in group.objects(after) if held is not None]
            after = found[0] if found else None
        for (place, name), value in (after or {}).items():
            module = self._modules[place][1]
            held = module._buffers[name]
            if held is None or held.shape != value.shape or held.dtype != value.dtype:
                module._buffers[name] = value if held is None else value.to(held.device)
            else:
                with torch.no_grad():
                    held.copy_(value)

    def _named(self, key: tuple[int, str]) -> str:
        place, name = key
        return ".".join(part for part in (self._modules[place][0], name) if part)


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _different(
    first: dict[tuple[int, str], Tensor], second: dict[tuple[int, str], Tensor]
) -> tuple[int, str] | None:
    for key in [*first, *second]:
        a, b = first.get(key), second.get(key)
        if a is None or b is None or a.shape != b.shape or not _equal(a, b):
            return key
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    # NaN in the same places is the same. A second look, for the few buffers that hold one.
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
