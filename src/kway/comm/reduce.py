"""Gradients of all ranks summed, in whatever order the back end sums."""

from collections.abc import Collection, Sequence

import torch

from kway.comm.flat import FlatGradients
from kway.comm.group import Group
from kway.comm.sparse import SparseReducer


class GradientReducer:
    """Sums the gradients of ``parameters`` over ``group``, together with a vector of ``scalars`` numbers.

    One all-reduce for each dtype. The gradients of the parameters named in ``tables`` may be sparse and stay so,
    by a gather of their rows; a sparse gradient of another parameter becomes dense. ``frozen``: the model's other
    parameters, which have no gradient.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        scalars: int,
        tables: Collection[torch.nn.Parameter] = (),
        frozen: Collection[torch.nn.Parameter] = (),
    ) -> None:
        self.parameters, self.group = list(parameters), group
        wanted = {id(table) for table in tables}
        sparse = [parameter for parameter in self.parameters if id(parameter) in wanted]
        dense = [parameter for parameter in self.parameters if id(parameter) not in wanted]
        self.flat = FlatGradients(dense, scalars, beside=[*sparse, *frozen])
        self.sparse = SparseReducer(sparse, group)

    def reduce(self, scalars: torch.Tensor, counts: bool = True) -> torch.Tensor:
        """Sum gradients and ``scalars`` (shape (n,)) over the ranks; return the summed scalars.

        ``counts=False``: this rank holds no sample. Afterwards every gradient is equal on all ranks, and ``None``
        where no rank had one; dense ones are views into flat vectors.
        """
        complete = self.flat.collect(scalars, counts)
        for vector in self.flat.vectors:
            self.group.sum_(vector)
        self.flat.hand_out(complete)
        self.sparse.reduce(counts)
        return self.flat.scalars.to(scalars.dtype)

    def divide_(self, divisor: torch.Tensor) -> None:
        """Divide all gradients by a scalar tensor, in place."""
        self.flat.divide_(divisor)
        self.sparse.divide_(divisor)
