"""A backward pass that meets that of the other ranks.

Normalisation over the global batch and gathers of all samples communicate in backward. A rank whose loss is a
constant, or does not reach the output of such a layer, has nothing to differentiate there, but the others wait for it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kway.data.structure import tensors
from kway.errors import RefusedError
from kway.step.checkpointing import recomputing

Tensor = torch.Tensor


class Meeting:
    """What of the forward pass of one micro-batch communicates again in backward.

    All of it does, on every rank: autograd works off its nodes in the reverse of the order in which forward made
    them, so that ranks meet in one order as long as none of them leaves one out.
    """

    def __init__(self) -> None:
        self._edges: list[tuple[GradientEdge, Tensor]] = []
        # Whether anything does inside of compiled code, whose backward pass is entered through what the model returned.
        self.in_code = False

    def clear(self) -> None:
        """Forget the last forward pass."""
        self._edges.clear()
        self.in_code = False

    def add(self, made: Tensor) -> None:
        """Note what a collective made. Its place in the graph is kept, not its values."""
        # What is computed again inside a backward pass belongs to that pass.
        if made.requires_grad and not recomputing():
            like = torch.empty((), dtype=made.dtype, device=made.device).expand(made.shape)
            self._edges.append((get_gradient_edge(made), like))

    def backward(self, model: nn.Module, objective: Tensor, output: Any) -> None:
        """Add the gradients of a scalar, and take part in the collectives that it does not reach.

        ``output``: what the model returned.

        There backward starts with zeros. The samples of this rank have gradients nevertheless: they are part of what
        the others normalised or compared. A parameter that only these starts reach, and whose gradient is zero, has
        none afterwards: a zero would move it by momentum and decay.
        """
        unmet, entries = self._unmet(), self._entries(output)
        missing, seen = {edge.node for edge, _ in unmet}, set[Any]()
        # Compiled code is entered as a whole, through any of what it returned.
        closed = {edge.node for edge, _ in entries}
        for node in _walk([objective.grad_fn], seen) if missing or closed else ():
            missing.discard(node)
            if node in closed:
                closed = set()
            if not missing and not closed:
                break
        if not missing and not closed:
            objective.backward()  # type: ignore[no-untyped-call]
            return
        starts = [(edge, like) for edge, like in [*unmet, *entries] if edge.node in missing | closed]
        # A parameter that the scalar reaches has a gradient on one device too, be it zero.
        beyond = {id(getattr(node, "variable", None)) for node in _walk(missing | closed, seen)}
        without = [p for _, p in model.named_parameters() if p.grad is None and id(p) in beyond]
        roots: list[Any] = [objective, *(edge for edge, _ in starts)]
        torch.autograd.backward(roots, [None, *(_zeros(like) for _, like in starts)])
        _drop_zeros(without)

    def attend(self, model: nn.Module, output: Any) -> None:
        """Take part in the collectives of the others' backward passes, for a loss that is a constant.

        Backward also starts at the model's outputs: a part that is computed again inside backward communicates
        there, and noted nothing before. A parameter whose gradient is zero has none afterwards.
        """
        if not self._edges and not self.in_code:
            return
        starts = self._unmet()
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
        without = [parameter for _, parameter in model.named_parameters() if parameter.grad is None]
        roots: list[Any] = [*outputs, *(edge for edge, _ in starts)]
        torch.autograd.backward(roots, [_zeros(like) for like in [*outputs, *(like for _, like in starts)]])
        _drop_zeros(without)

    def _entries(self, output: Any) -> list[tuple[GradientEdge, Tensor]]:
        """List what the model returned, where compiled code made some of it that meets other ranks in backward."""
        returned = (
            [tensor for tensor in tensors(output) if tensor.grad_fn is not None] if self.in_code else []
        )
        return [(get_gradient_edge(tensor), tensor.detach()) for tensor in returned]

    def _unmet(self) -> list[tuple[GradientEdge, Tensor]]:
        """List what no derivative that the model or the loss took by itself has come through already."""
        return [(edge, like) for edge, like in self._edges if not getattr(edge.node, "met", False)]


def _walk(nodes: Iterable[Any], seen: set[Any]) -> Iterator[Any]:
    """Yield the nodes of a graph that backward from ``nodes`` comes through, but those in ``seen``, and note them."""
    open_ones = [node for node in nodes if node is not None]
    while open_ones:
        node = open_ones.pop()
        if node not in seen:
            seen.add(node)
            yield node
            open_ones.extend(before for before, _ in node.next_functions if before is not None)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def _drop_zeros(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and not (grad._values() if grad.is_sparse else grad).any():
            parameter.grad = None


def refuse_second_derivative(what: str) -> None:
    """Raise ``RefusedError`` where backward builds a graph of its own (``create_graph=True``)."""
    if torch.is_grad_enabled():
        raise RefusedError(
            f"a derivative of a derivative through {what}, on several devices",
            "what the devices exchange in backward has one derivative",
            "use one device, or exactness bits or loose, where every layer sees one device's samples",
        )
