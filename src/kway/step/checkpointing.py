"""Activation checkpointing: what is computed a second time must not count a second time.

A checkpointed part of a model runs again inside the backward pass. Its outputs and gradients come out right, but
batch normalisation would move its running statistics twice, and any module that counts would count twice.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


def recomputing() -> bool:
    """Whether the code that asks runs inside a backward pass, on any thread: as a part that is computed again.

    Autograd numbers the backward pass that a thread works for, and torch's own checkpointing asks in this way.
    """
    # Under a compiler nothing runs eagerly inside backward, and the question would break the graph in two.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """While open, a forward pass inside a backward pass leaves the buffers of ``model`` as they are.

    It works on copies, of which nothing is left: what a layer adds in place and what it assigns are both undone.
    """
    with ExitStack() as hooks:
        for module in model.modules():
            if module._buffers and not isinstance(module, torch.jit.ScriptModule):
                lend, take_back = _lender(module)
                hooks.callback(module.register_forward_pre_hook(lend, prepend=True).remove)
                # A recomputation ends with an exception as soon as it has all that backward needs.
                hooks.callback(module.register_forward_hook(take_back, always_call=True).remove)
        yield


def _lender(module: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
    """Make the hooks of one module: before a recomputation it gets copies of its buffers, after it its own."""
    own: list[dict[str, Tensor | None]] = []

    def lend(_: nn.Module, args: Any) -> None:
        if recomputing():
            own.append(dict(module._buffers))
            module._buffers.update({n: b if b is None else b.clone() for n, b in module._buffers.items()})

    def take_back(_: nn.Module, args: Any, result: Any) -> None:
        if own and recomputing():
            module._buffers.update(own.pop())

    return lend, take_back
