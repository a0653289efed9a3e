"""A model of somebody else's, lent to what moves or casts it, and back afterwards in its own memory."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

Tensor = torch.Tensor
Place = tuple[torch.device, torch.dtype]


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Bring parameters and buffers that are moved or cast inside back at the end, to the memory where they lay.

    An open job goes on with them: its optimizer holds the parameters, recorded steps read them at their addresses.
    Values that were changed inside stay changed, and what was made there goes where the rest goes. What was moved
    keeps its old memory meanwhile.
    """
    held = [_Held(own, name) for own, name in _slots(model)]
    try:
        yield
    finally:
        moved: dict[torch.device, torch.device] = {}
        with torch.no_grad():
            for each in held:
                each.put_back(moved)
            known = {(id(each.own), each.name) for each in held}
            for own, name in _slots(model):
                if (id(own), name) not in known and own[name].device in moved:
                    _bring(own, name, (moved[own[name].device], own[name].dtype))


class _Held:
    """What a module holds under a name, its gradient, and the memory of both: ``Module.to`` gives them another."""

    def __init__(self, own: MutableMapping[str, Any], name: str) -> None:
        self.own, self.name = own, name
        self.tensor: Tensor = own[name]
        self.data = self.tensor.data
        grad = self.tensor.grad if self.tensor.is_leaf else None
        self.grad = None if grad is None else (grad, grad.data)

    def put_back(self, moved: dict[torch.device, torch.device]) -> None:
        # Not get(), which the tables of a scripted module lack.
        now: Tensor | None = self.own[self.name] if self.name in self.own else None  # noqa: SIM401
        if now is None or is_lazy(now) or _place(now) == _place(self.data):
            return
        if now.device != self.data.device:
            moved[now.device] = self.data.device
        if now.shape != self.data.shape:
            # Another one, which was made of it inside.
            _bring(self.own, self.name, _place(self.data))
            return
        if now.dtype == self.data.dtype or not torch.equal(now.data, self.data.to(now.device, now.dtype)):
            self.data.copy_(now.data)
        if _place(self.tensor) != _place(self.data):
            self.tensor.data = self.data
        self.own[self.name] = self.tensor
        if self.grad is not None and now.grad is not None:
            grad, data = self.grad
            if _place(grad) != _place(data):
                grad.data = data
            self.tensor.grad = grad


def _slots(model: nn.Module) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            yield from ((own, name) for name, tensor in [*own.items()] if tensor is not None)


def _place(tensor: Tensor) -> Place:
    return tensor.device, tensor.dtype


def _bring(own: MutableMapping[str, Any], name: str, place: Place) -> None:
    device, dtype = place
    if isinstance(own[name], nn.Parameter):
        own[name].data = own[name].data.to(device, dtype)
    else:
        own[name] = own[name].to(device, dtype)
