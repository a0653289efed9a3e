"""A forward of kway's own on a layer that stays the same object, for as long as a job is open that needs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kway.step.presence import Presence

Forward = Callable[[torch.Tensor], torch.Tensor]


class StandIn:
    """Stands in for the forward of a layer that several open jobs may share: it is the one's that computes now."""

    def __init__(self) -> None:
        self.forwards: list[tuple[Presence, Forward]] = []

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer as the job does that took up a share last."""
        if len(self.forwards) == 1:
            return self.forwards[0][1](x)
        _, forward = max(self.forwards, key=lambda own: own[0].turn)
        return forward(x)


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
    for module, forward in forwards:
        place = stand_in_of(module)
        if place is None:
            place = StandIn()
            vars(module)["forward"] = place.compute
        place.forwards.append((presence, forward))
    try:
        yield
    finally:
        for module, _ in forwards:
            place = stand_in_of(module)
            if place is not None:
                place.forwards = [own for own in place.forwards if own[0] is not presence]
                if not place.forwards:
                    del vars(module)["forward"]
