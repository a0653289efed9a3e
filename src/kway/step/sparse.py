"""Which parameters may get sparse gradients, and gradients made dense for those who want them so."""

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
