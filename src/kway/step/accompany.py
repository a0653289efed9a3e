"""A backward pass for the collectives alone.

Normalisation over the global batch and gathers of all samples communicate in backward. A rank whose loss is a
constant has nothing to differentiate, but the others wait for it there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kway.errors import RefusedError

Tensor = torch.Tensor


class Meeting:
    """What of the forward pass of one micro-batch communicates again in backward."""

    def __init__(self) -> None:
        self._edges: list[tuple[GradientEdge, Tensor]] = []
        self._by_model = 0

    def clear(self) -> None:
        """Forget the last forward pass."""
        self._edges.clear()
        self._by_model = 0

    def add(self, made: Tensor) -> None:
        """Note what a collective made. Its place in the graph is kept, not its values."""
        if made.requires_grad:
            like = torch.empty((), dtype=made.dtype, device=made.device).expand(made.shape)
            self._edges.append((get_gradient_edge(made), like))

    def leave_model(self) -> None:
        """What follows is made by the loss."""
        self._by_model = len(self._edges)

    def attend(self, model: nn.Module, output: Any) -> None:
        """Take part in the collectives of the others' backward passes, with a gradient of zero for each output.

        The samples of this rank have gradients nevertheless: they are part of what the others normalised or
        compared. Backward starts where a loss would: at the model's outputs, and at what the loss itself gathered.
        A parameter whose gradient is zero has none afterwards: a zero would move it by momentum and decay.
        """
        if not self._edges:
            return
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        # A model that returns its own loss as a constant has no outputs to start at, only what it computed.
        made = self._edges[self._by_model :] if outputs else self._edges
        roots: list[Any] = [*outputs, *(edge for edge, _ in made)]
        zeros = [torch.zeros_like(like) for like in [*outputs, *(like.contiguous() for _, like in made)]]
        without = [parameter for parameter in model.parameters() if parameter.grad is None]
        torch.autograd.backward(roots, zeros)
        for parameter in without:
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None


def refuse_second_derivative(what: str) -> None:
    """Raise ``RefusedError`` where backward builds a graph of its own (``create_graph=True``)."""
    if torch.is_grad_enabled():
        raise RefusedError(
            f"a derivative of a derivative through {what}, on several devices",
            "what the devices exchange in backward has one derivative",
            "use one device, or exactness bits or loose, where every layer sees one device's samples",
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for entry in value:
            yield from tensors_in(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
