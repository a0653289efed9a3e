"""Gradients of all ranks summed, in whatever order the back end sums."""

from collections.abc import Sequence

import torch

from kway.comm.flat import FlatGradients
from kway.comm.group import Group


class GradientReducer:
    """Sums the gradients of ``parameters`` over ``group``, together with a vector of ``scalars`` numbers.

    One all-reduce for each dtype.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: Group, scalars: int) -> None:
        self.flat, self.group = FlatGradients(parameters, scalars), group

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are summed."""
        return self.flat.parameters

    def reduce(self, scalars: torch.Tensor, counts: bool = True) -> torch.Tensor:
        """Sum gradients and ``scalars`` (shape (n,)) over the ranks; return the summed scalars.

        ``counts=False``: this rank holds no sample. Afterwards every gradient is a view into flat vectors,
        equal on all ranks, and ``None`` where no rank had one. Raises ``RefusedError`` for sparse gradients.
        """
        complete = self.flat.collect(scalars, counts)
        for vector in self.flat.vectors:
            self.group.sum_(vector)
        self.flat.hand_out(complete)
        return self.flat.scalars.clone()

    def divide_(self, divisor: torch.Tensor) -> None:
        """Divide all gradients by a scalar tensor, in place."""
        self.flat.divide_(divisor)
