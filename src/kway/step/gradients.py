"""Forms of a gradient: sparse ones and conjugate views, and both made plain for those who want them so."""

from collections.abc import Iterable

import torch
from torch import nn


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


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is, or a sparse one with its zeros."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def resolve_conjugates(parameters: Iterable[nn.Parameter]) -> None:
    """Write out gradients that are conjugate views: torch's functions over many tensors do not take them."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()
