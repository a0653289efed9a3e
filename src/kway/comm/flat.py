"""The gradients of a model as one flat vector for each dtype, with flags and scalars behind them."""

from collections.abc import Sequence

import torch

from kway.errors import RefusedError

# Scalars travel with a gradient vector only where its dtype holds counts and losses well enough.
_CARRIERS = (torch.float32, torch.float64)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as pairs of reals: not every collective keeps an imaginary part."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class FlatGradients:
    """Storage for the gradients of ``parameters``, one flag a parameter and ``scalars`` numbers.

    A flag is above 0 where anybody had a gradient for the parameter: a parameter without one keeps
    ``grad = None``, since a zero gradient would move it by momentum and decay. ``vectors`` is what gets
    summed; flags and numbers lie at the end of one of them.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], scalars: int) -> None:
        self.parameters = list(parameters)
        reals = [_real(parameter.detach()) for parameter in self.parameters]
        device = reals[0].device if reals else torch.device("cpu")
        carrier = next((real.dtype for real in reals if real.dtype in _CARRIERS), torch.float32)
        count = len(self.parameters)
        lengths = dict.fromkeys([carrier, *(real.dtype for real in reals)], 0)
        places = []
        for real in reals:
            places.append(lengths[real.dtype])
            lengths[real.dtype] += real.numel()
        lengths[carrier] += count + scalars
        store = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in lengths.items()}
        self.vectors = list(store.values())
        tail = store[carrier][lengths[carrier] - count - scalars :]
        self.flags, self.scalars = tail[:count], tail[count:]
        self._views = []
        for parameter, real, place in zip(self.parameters, reals, places, strict=True):
            piece = store[real.dtype][place : place + real.numel()].view(real.shape)
            self._views.append(torch.view_as_complex(piece) if parameter.is_complex() else piece)

    def collect(self, scalars: torch.Tensor, counts: bool = True) -> bool:
        """Copy the gradients and ``scalars`` in; return whether every parameter had a gradient that counts.

        ``counts=False``: what this rank has is a zero that must not make a parameter look used. Raises
        ``RefusedError`` for sparse gradients.
        """
        present = [parameter.grad is not None for parameter in self.parameters]
        views = [view for view, there in zip(self._views, present, strict=True) if there]
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise RefusedError(
                "a sparse gradient (an embedding with sparse=True)",
                "several devices sum dense gradients",
                "use sparse=False",
            )
        complete = all(present) and counts
        if not complete:
            for vector in self.vectors:
                vector.zero_()
        if counts:
            torch._foreach_copy_(views, grads)
        if complete:
            self.flags.fill_(1.0)
        else:
            self.flags.copy_(torch.tensor([float(there and counts) for there in present]))
        self.scalars.copy_(scalars)
        return complete

    def hand_out(self, complete: bool = False) -> None:
        """Make every gradient a view into the vectors, or ``None`` where no flag is up.

        ``complete``: all flags are known to be up, so that nothing has to be read back.
        """
        used = [True] * len(self.parameters) if complete else (self.flags > 0).tolist()
        for parameter, view, there in zip(self.parameters, self._views, used, strict=True):
            parameter.grad = view if there else None

    def divide_(self, divisor: torch.Tensor) -> None:
        """Divide all gradients by a scalar tensor, in place (flags and scalars have been read by now)."""
        for vector in self.vectors:
            vector.div_(divisor)
