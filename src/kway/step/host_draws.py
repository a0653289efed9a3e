"""Whether a step draws from the generators of which a process has one: those of its CPU, of numpy and of Python."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kway.step.process_wide import drawing
from kway.step.seeds import Draws, Keyed


class HostDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a step. ``found``: whether it has drawn on the host so far.

    Operations are looked at one by one, since what is drawn from a generator that is put back leaves no trace in it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        self._moved: Callable[[], bool] = bool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see whether it is a random one on the CPU."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs or {}):
            self.found |= any(
                isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in tree_leaves(result)
            )
        return result

    def draws(self, keys: Sequence[int], device: torch.device) -> Draws:
        """Make what the step draws from: by its keys, each use of which is looked at."""
        return _Watched(self, keys, device)

    def seeded(self) -> None:
        """Look from here on, after the generators were seeded."""
        self._moved = drawing()

    def look(self) -> None:
        """See whether anything was drawn since the generators were seeded."""
        self.found |= self._moved()


def _drops_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is an attention without dropout: that may draw by what it is, and does not by what it is given."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False


class _Watched(Keyed):
    def __init__(self, watch: HostDraws, keys: Sequence[int], device: torch.device) -> None:
        super().__init__(keys, device)
        self._watch = watch

    def at(self, place: int) -> None:
        self._watch.look()
        super().at(place)
        self._watch.seeded()


class OnDevice(Keyed):
    """Seeds the generator of a GPU, which no other rank draws from, and none of the process's."""

    def at(self, place: int) -> None:
        """Seed it, if the device is one that has its own."""
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(self._keys[place])


@contextmanager
def watched() -> Iterator[HostDraws]:
    """Watch what is done inside."""
    watch = HostDraws()
    with watch:
        yield watch
    watch.look()
