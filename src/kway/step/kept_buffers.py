"""Buffers that a forward pass changes, where a batch is computed in pieces: each piece starts from the step's own.

Plain attributes go along (``kept_attributes``), so that both begin and end with the same pieces.

Pieces are the shards of level bits, or micro-batches. Batch normalisation over shards is not among them (see
``pooled``). What follows from the weights alone, such as the vectors of spectral normalisation or a counter, comes out
the same for every piece, and moves once a step as on a whole batch. What depends on the samples would be another on
every number of devices, or for every size of the pieces.

A buffer that a layer makes when it first runs starts, for every piece, from the value with which it was registered. It
is not taken away again between pieces: the layer may remember that it has made it.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils.hooks import RemovableHandle

from kway.comm.group import Group
from kway.errors import RefusedError
from kway.step.kept_attributes import KeptAttributes
from kway.step.made import add_buffer

Tensor = torch.Tensor
Key = tuple[int, str]
# A buffer, its version, and a copy of its values at that version.
Known = tuple[Tensor, int, Tensor]


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
    """Buffers of ``model`` but those of the layers in ``without``, and plain attributes, over the pieces of a batch.

    ``doubts``: gets lines for the user about attributes.
    """

    def __init__(self, model: nn.Module, without: list[nn.Module], piece: Piece, doubts: list[str]) -> None:
        self._piece, self._attributes = piece, KeptAttributes(piece.name, doubts)
        left_out = {id(module) for module in without}
        # Also those that have no buffer yet.
        self._modules = [(n, module) for n, module in model.named_modules() if id(module) not in left_out]
        self._places = {id(module): place for place, (_, module) in enumerate(self._modules)}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._before: dict[Key, Known] = {}
        # Made since the step began, as they were registered. ``None`` between steps.
        self._made: dict[Key, Known] | None = None
        self._after: dict[Key, Tensor] | None = None
        self._hook: RemovableHandle | None = _listen(self)

    def close(self) -> None:
        """Hear of no new buffers any more.

        To be called at the end of a job. The collector must not do it: torch may be going through the hooks when it
        comes by, or compiling code that does.
        """
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of new buffers inside, also after ``close``."""
        if self._hook is not None:
            yield
            return
        self._hook = _listen(self)
        try:
            yield
        finally:
            self.close()

    def forget(self) -> None:
        """Copy all of them when the next step begins, also where they look unchanged."""
        self._before = {}

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Take the values from which every piece of a step starts. Copies only what changed since the last step.

        ``modules``: the model and those in it as they are now, whose attributes count.
        """
        self._attributes.begin(modules)
        now = {}
        for place, (_, module) in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    known = self._before.get((place, name))
                    now[place, name] = known if known and _is(known, buffer) else _know(buffer)
        self._before, self._made, self._after = now, {}, None

    def registered(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Note a buffer that is new, with the value it has now: a layer may change it as soon as it is there."""
        place = self._places.get(id(module))
        if self._made is not None and place is not None:
            self._made[place, name] = _know(value)

    def end_of_piece(self) -> None:
        """Put the step's values back. Raises ``RefusedError`` where two pieces left different values."""
        self._attributes.end_of_piece()
        after = {}
        made = self._made or {}
        for place, (_, module) in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                key = (place, name)
                known = made.get(key) or self._before.get(key)
                if buffer is None or (known and _is(known, buffer)):
                    continue
                if key in made and buffer is not made[key][0] and _says_the_same(buffer, made[key][2]):
                    # Made once more, as a flag that says that it was there has been put back.
                    module._buffers[name] = made[key][0]
                    continue
                after[key] = _copy(buffer)
                if known is None:
                    module._buffers[name] = None
                    continue
                with torch.no_grad():
                    known[0].copy_(known[2])
                module._buffers[name] = known[0]
                self._before[key] = (known[0], known[0]._version, known[2])
        if self._after is None:
            self._after = after
        elif name := _different(self._after, after):
            raise RefusedError(
                f"buffer {self._named(name)!r} depends on the samples of a {self._piece.name}",
                self._piece.need,
                self._piece.do,
            )

    def end_of_step(self, group: Group, idle: bool) -> None:
        """Give buffers and attributes the values that the pieces left. ``idle``: some rank has computed none; then a
        collective, in which it takes the values of the first that did.
        """
        after, made = self._after, self._made or {}
        attributes = None
        if idle and group.size > 1:
            told = None if after is None else (_on_cpu(after), self._tellable(made), self._attributes.told())
            found = [held for held in group.objects(told) if held is not None]
            if found and after is None:
                after, others, attributes = found[0]
                for (place, name), (value, persistent) in others.items():
                    add_buffer(self._modules[place][1], name, value.to(self._device), persistent)
        # Before: where a buffer takes the place of an attribute, it has by now.
        self._attributes.end_of_step(attributes)
        self._made = None
        for (place, name), value in (after or {}).items():
            module = self._modules[place][1]
            held = module._buffers[name]
            if held is None or held.shape != value.shape or held.dtype != value.dtype:
                module._buffers[name] = value.to(self._device if held is None else held.device)
            else:
                with torch.no_grad():
                    held.copy_(value)

    def _tellable(self, made: dict[Key, Known]) -> dict[Key, tuple[Tensor, bool]]:
        """Return what another rank needs to have the same new buffers: their first values, whether they persist."""
        return {
            (place, name): (known[2].cpu(), name not in self._modules[place][1]._non_persistent_buffers_set)
            for (place, name), known in made.items()
        }

    def _named(self, key: Key) -> str:
        place, name = key
        return ".".join(part for part in (self._modules[place][0], name) if part)


def _listen(kept: KeptBuffers) -> RemovableHandle:
    """Tell ``kept`` of buffers that are new, until what is returned is removed.

    Torch keeps such a hook for all modules of a process; this one keeps no model alive.
    """
    own = weakref.ref(kept)

    def hook(module: nn.Module, name: str, value: Tensor | None) -> None:
        held = module._buffers.get(name)
        # One of another shape is new as well, such as a table that grows with the longest input.
        if value is None or (held is not None and held.shape == value.shape):
            return
        if (found := own()) is not None:
            found.registered(module, name, value)

    return register_module_buffer_registration_hook(hook)


def _know(buffer: Tensor) -> Known:
    return buffer, buffer._version, _copy(buffer)


def _is(known: Known, buffer: Tensor) -> bool:
    """Whether a buffer is the one that is known, unchanged."""
    return known[0] is buffer and known[1] == buffer._version


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _on_cpu(buffers: dict[Key, Tensor]) -> dict[Key, Tensor]:
    return {key: buffer.cpu() for key, buffer in buffers.items()}


def _different(first: dict[Key, Tensor], second: dict[Key, Tensor]) -> Key | None:
    for key in [*first, *second]:
        a, b = first.get(key), second.get(key)
        if a is None or b is None or not _says_the_same(a, b):
            return key
    return None


def _says_the_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and _equal(a, b)


def _equal(a: Tensor, b: Tensor) -> bool:
    # NaN in the same places is the same. A second look, for the few buffers that hold one.
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
