"""Which layer runs, in forward and in backward, of any model as it is: by hooks, and by autograd's own numbering.

Autograd numbers the nodes of its graph as they are made. What a layer's forward made has numbers between those at its
begin and at its end, so that each node belongs to the innermost layer that ran when it was made, and its run in
backward to that layer too: with layers called twice, containers that compute themselves, and any control flow.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from kway.step.checkpointing import recomputing
from kway.step.core import StepCore

# What runs in forward and belongs to no layer.
LOSS = "(loss)"
# What is called with each change of layer, and its name; ``None``: what runs now is nobody's.
Turn = Callable[[str | None], None]


class Layers:
    """Follows which layer runs. ``turn`` is told each change, ``returned`` what each layer was given and gave back."""

    def __init__(
        self,
        model: nn.Module,
        turn: Turn,
        returned: Callable[[str, Any, Any], None] | None = None,
    ) -> None:
        self._turn, self._returned, self._model = turn, returned, model
        self.names = dict(_hooked("", model))
        self.part = ""
        self._stack: list[str] = []
        # Numbers of autograd from which on a layer made the nodes, in order.
        self._from: list[int] = []
        self._by: list[str] = []
        self._owner = {
            id(parameter): name
            for name, module in self.names.items()
            for parameter in module.parameters(recurse=False)
        }

    @contextmanager
    def around(self, part: str, core: StepCore, args: tuple[Any, ...]) -> Iterator[None]:
        """Follow one forward or backward pass: see ``phases.Phases``."""
        with ExitStack() as hooks:
            self.part = part
            hooks.callback(setattr, self, "part", "")
            if part == "forward":
                self._from.clear()
                self._by.clear()
                self._stack = [LOSS]
                for name, module in self.names.items():
                    self._hook(name, module, hooks)
                self._switch(LOSS)
            elif part == "backward" and isinstance(args[0], torch.Tensor):
                self._turn(None)
                self._follow(args[0].grad_fn, hooks)
            try:
                yield
            finally:
                # Before hooks are taken away, which is no part of the pass.
                self._turn(None)

    def _hook(self, name: str, module: nn.Module, hooks: ExitStack) -> None:
        def enters(_: nn.Module, args: Any) -> None:
            # What is computed again in backward belongs to the node that asks for it.
            if not recomputing():
                self._stack.append(name)
                self._switch(name)

        def leaves(_: nn.Module, args: Any, result: Any) -> None:
            if not recomputing() and len(self._stack) > 1:
                self._stack.pop()
                self._switch(self._stack[-1])
                if self._returned is not None:
                    self._returned(name, args, result)

        hooks.callback(module.register_forward_pre_hook(enters).remove)
        hooks.callback(module.register_forward_hook(leaves, always_call=True).remove)

    def _switch(self, name: str) -> None:
        numbering: Any = torch._C._autograd
        self._from.append(numbering._get_sequence_nr())
        self._by.append(name)
        self._turn(name)

    def _follow(self, root: Any, hooks: ExitStack) -> None:
        """Hook every node of a graph: it runs for the layer that made it."""
        waiting, seen = [root], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            name = self._made(node)
            hooks.callback(node.register_prehook(self._begins(name)).remove)
            hooks.callback(node.register_hook(self._ends).remove)

    def _made(self, node: Any) -> str:
        variable = getattr(node, "variable", None)
        if variable is not None:
            # Gradients are added up where parameters lie, numbered last of all.
            return self._owner.get(id(variable), LOSS)
        place = bisect_right(self._from, node._sequence_nr()) - 1
        return self._by[place] if place >= 0 else LOSS

    def _begins(self, name: str) -> Callable[[Any], None]:
        return lambda grads: self._turn(name)

    def _ends(self, *grads: Any) -> None:
        self._turn(None)


def _hooked(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that can be hooked, by name, the model itself as ``""``: what is scripted is one piece."""
    seen: set[int] = set()

    def within(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
            return
        seen.add(id(module))
        yield name, module
        for child, held in module.named_children():
            yield from within(f"{name}.{child}" if name else child, held)

    return within(prefix, module)


class Timer:
    """Adds up the time of each layer, by part. ``layers``: whom it follows, set once made."""

    def __init__(self, now: Callable[[], Any], between: Callable[[Any, Any], float]) -> None:
        self._now, self._between = now, between
        self.layers: Layers | None = None
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._name: str | None = None
        self._since: Any = None

    def turn(self, name: str | None) -> None:
        """Another layer runs from now on."""
        now = self._now()
        if self._name is not None and self.layers is not None:
            self._spans.append((self.layers.part, self._name, self._since, now))
        self._name, self._since = name, now

    def take(self) -> dict[tuple[str, str], float]:
        """Return seconds by (part, layer) since the last time, of a device that has been waited for."""
        found: dict[tuple[str, str], float] = {}
        for part, name, begin, end in self._spans:
            found[part, name] = found.get((part, name), 0.0) + self._between(begin, end)
        self._spans.clear()
        return found
