"""Gradients of all ranks summed in one flat vector for each dtype."""

from collections.abc import Sequence

import torch

from kway.comm.group import Group
from kway.errors import RefusedError

# Scalars travel with a gradient vector only where its dtype holds counts and losses well enough.
_CARRIERS = (torch.float32, torch.float64)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as pairs of reals: not every collective keeps an imaginary part."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class GradientReducer:
    """Sums the gradients of ``parameters`` over ``group``, together with a vector of scalars.

    One all-reduce for each dtype. Behind the gradients travels one flag a parameter, which says whether any
    rank had a gradient for it: a parameter without a gradient on all ranks keeps ``grad = None`` (a zero
    gradient would move it by momentum and decay), one that only some ranks used gets the sum on all.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: Group, scalars: int) -> None:
        self.parameters, self.group, self.scalars = list(parameters), group, scalars
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []
        dtypes = [_real(p.detach()).dtype for p in self.parameters]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        carrier = next((dtype for dtype in dtypes if dtype in _CARRIERS), torch.float32)
        tail = len(self.parameters) + scalars
        for dtype in {*dtypes, carrier}:
            length = sum(
                _real(p.detach()).numel() for p, d in zip(self.parameters, dtypes, strict=True) if d == dtype
            )
            size = length + (tail if dtype == carrier else 0)
            self._flat[dtype] = torch.zeros(size, dtype=dtype, device=device)
        self._tail = self._flat[carrier][self._flat[carrier].numel() - tail :]
        offsets = dict.fromkeys(self._flat, 0)
        for parameter, dtype in zip(self.parameters, dtypes, strict=True):
            like = _real(parameter.detach())
            piece = self._flat[dtype][offsets[dtype] : offsets[dtype] + like.numel()].view(like.shape)
            offsets[dtype] += like.numel()
            self._views.append(torch.view_as_complex(piece) if parameter.is_complex() else piece)

    def reduce(self, scalars: torch.Tensor, counts: bool = True) -> torch.Tensor:
        """Sum gradients and ``scalars`` (shape (n,)) over the ranks; return the summed scalars.

        ``counts=False``: this rank holds no sample, so what it has is a zero that must not make a parameter
        look used. Afterwards every gradient is a view into the flat vectors, equal on all ranks.
        Raises ``RefusedError`` for sparse gradients.
        """
        present = [p.grad is not None for p in self.parameters]
        views = [view for view, there in zip(self._views, present, strict=True) if there]
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise RefusedError(
                "a sparse gradient (an embedding with sparse=True)",
                "several devices sum dense gradients",
                "use sparse=False",
            )
        if not all(present) or not counts:
            for flat in self._flat.values():
                flat.zero_()
        if counts:
            torch._foreach_copy_(views, grads)
        flags = self._tail[: len(present)]
        if all(present) and counts:
            flags.fill_(1.0)
        else:
            flags.copy_(torch.tensor([float(there and counts) for there in present]))
        self._tail[len(present) :].copy_(scalars)
        for flat in self._flat.values():
            self.group.sum_(flat)
        used = present if all(present) and counts else (flags > 0).tolist()
        for parameter, view, there in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if there else None
        return self._tail[len(present) :].clone()

    def divide_(self, divisor: torch.Tensor) -> None:
        """Divide all gradients by a scalar tensor, in place."""
        for flat in self._flat.values():
            flat.div_(divisor)
