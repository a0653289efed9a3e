"""A forward of kway's own on a layer that stays the same object, for as long as a job is open that needs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

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

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the layer as the job does that took up a share last. The argument has the name that torch's has."""
        return self.forwards[-1](input)

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
