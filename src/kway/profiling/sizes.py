"""What weights, gradients, optimizer and buffers of a model take, each piece of memory counted once."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kway.profiling.counted import pieces

Tensor = torch.Tensor


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes in which these tensors lie."""
    return sum(dict(piece for tensor in tensors for piece in pieces(tensor)).values())


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``Workload.parameters`` of a model whose optimizer has taken a step."""
    held = list(model.parameters())
    trained = [parameter for parameter in held if parameter.requires_grad]
    state = pytree.tree_leaves([list(entry.values()) for entry in optimizer.state.values()])
    return {
        "count": sum(parameter.numel() for parameter in held),
        "bytes": bytes_of(held),
        "trainable_count": sum(parameter.numel() for parameter in trained),
        # Where one had no gradient in this step, another step may give it one.
        "gradient_bytes": sum(parameter.nbytes for parameter in trained),
        "optimizer_bytes": bytes_of(leaf for leaf in state if isinstance(leaf, Tensor)),
        "buffer_bytes": bytes_of(model.buffers()),
        "tied": tied(model),
    }


def tied(model: nn.Module) -> list[str]:
    """Name the parameters that are another one under a second name."""
    seen: set[int] = set()
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            found.append(name)
        seen.add(id(parameter))
    return found


def gradients_of(model: nn.Module) -> dict[str, int]:
    """Return how many numbers devices add up, by type: those of all parameters that are trained."""
    found: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            name = str(parameter.dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + parameter.numel()
    return found


def sample_bytes(batch: Any, samples: int) -> int:
    """Return the bytes of a sample, input and target, as they travel: a part of a collated batch."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return -(-sum(leaf.nbytes for leaf in leaves) // max(1, samples))
