"""Gradients that hold only the rows of a table that were looked up, summed without becoming dense.

Ranks look up other rows, and other numbers of them. Rows and values of all ranks are gathered, padded to the
longest, and added in rank order, so that every rank holds the same bits.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch

from kway.comm.group import Group
from kway.comm.rows import as_real, from_rows, has_rows, write

Tensor = torch.Tensor


class _Kind(IntEnum):
    """What a rank has for a parameter: of all ranks, the largest decides."""

    NONE = 0
    ROWS = 1
    DENSE = 2


class SparseReducer:
    """Sums the gradients of ``parameters``, which may be sparse along dimension 0, over ``group``."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
        self.parameters, self.group = list(parameters), group

    def reduce(self, counts: bool = True) -> None:
        """Sum the gradients over the ranks. A collective.

        A sum of sparse gradients is sparse and coalesced, with the rows that any rank looked up. Where a rank
        has a dense one (a table that is used in another way, too), so is the sum. ``counts=False``: this rank
        holds no sample. ``None`` stays where no rank has a gradient.
        """
        if not self.parameters:
            return
        own = [_own(parameter.grad if counts else None) for parameter in self.parameters]
        header = [
            (kind, 0 if grad is None or kind != _Kind.ROWS else grad.values().shape[0]) for kind, grad in own
        ]
        device = self.parameters[0].device
        every = self.group.stack(torch.tensor(header, dtype=torch.int64, device=device)).tolist()
        for place, (parameter, (_, grad)) in enumerate(zip(self.parameters, own, strict=True)):
            kind = max(rank[place][0] for rank in every)
            if kind == _Kind.NONE:
                parameter.grad = None
            elif kind == _Kind.DENSE:
                parameter.grad = self._dense(parameter, grad)
            else:
                parameter.grad = self._rows(parameter, grad, [rank[place][1] for rank in every])

    def divide_(self, divisor: Tensor) -> None:
        """Divide the gradients by a scalar tensor, in place."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                grad = parameter.grad
                as_real(grad.values() if grad.is_sparse else grad).div_(divisor)

    def _dense(self, parameter: torch.nn.Parameter, grad: Tensor | None) -> Tensor:
        whole = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        if grad is not None:
            write(grad, whole)
        self.group.sum_(as_real(whole))
        return whole

    def _rows(self, parameter: torch.nn.Parameter, grad: Tensor | None, sizes: list[int]) -> Tensor:
        longest = max(sizes)
        rows = torch.zeros(longest, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_zeros(longest, *parameter.shape[1:])
        if grad is not None:
            rows[: grad.values().shape[0]] = grad.indices()[0]
            values[: grad.values().shape[0]] = grad.values()
        every_rows = self.group.stack(rows)
        every_values = self.group.stack(as_real(values))
        parts = [every_rows[rank, :size] for rank, size in enumerate(sizes)]
        union, places = torch.unique(torch.cat(parts), return_inverse=True)
        total = values.new_zeros(len(union), *values.shape[1:])
        for rank, (size, own_places) in enumerate(zip(sizes, places.split(sizes), strict=True)):
            # The rows of one rank are all different: nothing here depends on the order within them.
            as_real(total).index_add_(0, own_places, every_values[rank, :size])
        return from_rows(union, total, parameter)


def _own(grad: Tensor | None) -> tuple[_Kind, Tensor | None]:
    if grad is None:
        return _Kind.NONE, None
    if has_rows(grad):
        return _Kind.ROWS, grad.coalesce()
    return _Kind.DENSE, grad
