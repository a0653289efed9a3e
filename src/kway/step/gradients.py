"""Forms of a gradient: sparse ones and conjugate views, and both made plain for those who want them so."""

from collections.abc import Iterable
from operator import itemgetter

import torch
from torch import nn

from kway.comm.apart import is_alone
from kway.errors import RefusedError


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of modules that are set to give sparse gradients, each once.

    Those are ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``, and modules of the user's own that
    say so in the same way.
    """
    found = [
        parameter
        for module in model.modules()
        if getattr(module, "sparse", False) is True
        for parameter in module.parameters(recurse=False)
        if parameter.dim()
    ]
    return list(dict.fromkeys(found))


def check_gradient_dtypes(model: nn.Module) -> None:
    """Raise ``RefusedError`` for a parameter of whose gradient it is not known in which dtype it can be summed."""
    for name, parameter in model.named_parameters():
        # Not every torch lets a gradient have a dtype of its own.
        wanted = getattr(parameter, "grad_dtype", parameter.dtype)
        if wanted is None or wanted.is_complex != parameter.is_complex():
            raise RefusedError(
                f"parameter {name!r} ({parameter.dtype}) with grad_dtype {wanted}",
                "gradients of devices and shards are summed in one dtype that is known before, complex where the "
                "parameter is",
                "set grad_dtype to the dtype that backward gives, or use one device and exactness math",
            )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is, or a sparse one with its zeros."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def resolve_conjugates(parameters: Iterable[nn.Parameter]) -> None:
    """Write out gradients that are conjugate views: torch's functions over many tensors do not take them."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()


def keep_apart(parameters: Iterable[nn.Parameter], more: bool = False) -> None:
    """Give each gradient memory of its own. ``more``: also where somebody keeps it who may write to it in backward.

    Both summands of a sum have one gradient, and where torch hands it to them as two views it leaves them so (compiled
    code often does). What then changes one in place, as adding up micro-batches, dividing and clipping do, would change
    the other as well. A function of the user's may return a view of memory that it fills anew in the next backward
    pass, to which this one's gradient is to be added.
    """
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    # Without gaps: torch copies what does not lie so before it makes a gradient of it.
    spans = [(g.data_ptr(), g.nbytes, p, g) for p, g in held if g.layout == torch.strided]
    reached = 0
    for start, length, parameter, grad in sorted(spans, key=itemgetter(0)):
        if length and (start < reached or (more and not is_alone(grad))):
            parameter.grad = grad.clone()
        reached = max(reached, start + length)
