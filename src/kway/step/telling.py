"""How seldom ranks tell each other which collectives they called, and in which steps they do so in any case."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Where comparing costs something, it is done once in so many steps.
SELDOM = 64


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Telling:
    """In which steps a fingerprint travels with the gradients (``kway.step.signs``). The same on all ranks.

    ``every``: in one of so many steps; ``also``: whether in the step that begins in any case. ``compared``: whether it
    is held against those of the others, whom one that rehearses alone does not hear.
    """

    every: int = 1
    also: Callable[[], bool] = _never
    compared: bool = True

    @property
    def each(self) -> bool:
        """Whether every step tells."""
        return self.every == 1

    def due(self, taken: int) -> bool:
        """Whether the step that begins tells, number ``taken`` (from 1) of those that this rank takes."""
        return not taken % self.every or self.also()


# For a loop after whose steps anything may come.
EACH_STEP = Telling()


def seldom_where_it_costs(device: torch.device, records: bool) -> int:
    """Return in one of how many steps to tell, where a loop compares by itself before it relies on their numbers.

    A CPU has the numbers at hand, and a step that is recorded (``records``) compares them without the host.
    """
    return 1 if device.type == "cpu" or records else SELDOM
