"""A forward of kway's own on a layer that stays the same object, for as long as a job is open that needs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from kway.errors import RefusedError
from kway.step.presence import Presence

Forward = Callable[[torch.Tensor], torch.Tensor]


class StandIn:
    """Stands in for the forward of a layer that several open jobs may share: it is the one's that computes now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # That of the job which took up a share last comes last.
        self.forwards: list[Forward] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the layer belongs to no job: it computes as its class does, with what is its own.
        return _plain, (self.module,)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer as the job does that took up a share last."""
        return self.forwards[-1](x)

    def turn_to(self, forward: Forward) -> None:
        """Compute by ``forward`` from now on."""
        if self.forwards[-1] is not forward:
            self.forwards.remove(forward)
            self.forwards.append(forward)


def _plain(module: nn.Module) -> StandIn:
    made = StandIn(module)
    made.forwards.append(partial(type(module).forward, module))
    return made


def stand_in_of(module: nn.Module) -> StandIn | None:
    """Return what kway has put in place of a layer's forward, if it has."""
    # A method, and no object of its own kind: that is what a compiler takes for a function.
    found = getattr(vars(module).get("forward"), "__self__", None)
    return found if isinstance(found, StandIn) else None


@contextmanager
def standing_in(forwards: list[tuple[Any, Forward]], presence: Presence) -> Iterator[None]:
    """While open, each layer of ``forwards`` computes by its own there. The layers keep class, state and names.

    ``presence``: says when the job computes.
    """
    begins = []
    for module, forward in forwards:
        place = stand_in_of(module)
        if place is None:
            place = StandIn(module)
            vars(module)["forward"] = place.compute
        place.forwards.append(forward)
        begins.append(partial(place.turn_to, forward))
    presence.begins += begins
    try:
        yield
    finally:
        presence.begins = [begin for begin in presence.begins if begin not in begins]
        for module, forward in forwards:
            place = stand_in_of(module)
            if place is not None:
                place.forwards.remove(forward)
                if not place.forwards:
                    del vars(module)["forward"]


class _Open:
    """The levels of the open jobs that a layer is part of. A copy of the layer is part of none."""

    def __init__(self) -> None:
        self.levels: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Open, ()


_MARK = "_kway_open"


@contextmanager
def part_of_a_job(named: list[tuple[str, Any]], level: str) -> Iterator[None]:
    """While open, layers that know their batch are part of a job at ``level``.

    Raises ``RefusedError`` for one that is part of an open job at another level: what it computes would be either's.
    """
    marks = [vars(layer).setdefault(_MARK, _Open()) for _, layer in named]
    try:
        for (name, _), mark in zip(named, marks, strict=True):
            other = next((each for each in mark.levels if each != level), None)
            if other is not None:
                raise RefusedError(
                    f"layer {name!r} is part of another open job, at exactness {other}",
                    f"this one is at {level}, and its batch statistics can be only one job's",
                    "use one level for both",
                )
        for mark in marks:
            mark.levels.append(level)
        try:
            yield
        finally:
            for mark in marks:
                mark.levels.remove(level)
    finally:
        for (_, layer), mark in zip(named, marks, strict=True):
            if not mark.levels:
                vars(layer).pop(_MARK, None)
