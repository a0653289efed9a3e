"""What a model, the functions around it and its optimizer keep on the host: a look at it between two steps.

A recorded step holds it as it was, and reads and writes tensors where they lay. Whoever changes it between two steps
means the next one to follow.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import nn

from kway.step.alike import DEPTH, alike, same
from kway.step.contents import Contents, Root
from kway.step.holders import is_the_users

Tensor = torch.Tensor
# Looked at elsewhere; the last is what a compiled step runs.
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_compiled_call_impl"})
# A loss module lies in what follows it, in what a rule closes over.
_DEPTH_AROUND = 8
_HOOKS, _STATE = "a hook of a parameter or of the optimizer", "the optimizer's state"
_HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class _Held:
    """Which objects the modules of a model hold, and what lies in these and in ``around``.

    ``failed`` says what could not be looked at; ``tensors``: those that lie there, each with its place.
    """

    def __init__(self, model: nn.Module, around: Sequence[Any], depth: int, elsewhere: bool) -> None:
        modules = dict(model.named_modules())
        # Held, so that no other object can take the place of one.
        self._modules, self._kinds = [*modules.values()], [*map(type, modules.values())]
        own = [(path, vars(module), dict(vars(module))) for path, module in modules.items()]
        inner = [
            (path, table[name], dict(table[name]))
            for path, table, _ in own
            for name in ("_buffers", "_modules")
        ]
        self._tables = [*own, *inner]
        self._known = [(table, [*known.values()]) for _, table, known in self._tables if known]
        # Most modules have no buffers, and none below them.
        self._empty = [table for _, table, known in inner if not known]
        inside = [
            Root(value, of_the_model, _joined(path, name))
            for path, _, known in own
            for name, value in known.items()
            if name not in _TABLES
        ]
        roots = [Root(value, partial(_kept, _title(value)), "", depth, _is_ours(value)) for value in around]
        roots += [Root(f, partial(_kept, f.__qualname__)) for f in _functions_of(dict.fromkeys(self._kinds))]
        # Each to its end: a model that holds much must not hide what a loss counts.
        self._contents = Contents(inside, roots, known=self._modules)
        self.failed, self.tensors = self._contents.failed, self._contents.tensors
        self._numbers = _OnHost(self.tensors if elsewhere else [])

    def unchanged(self) -> bool:
        """Whether all are the same objects, or say the same."""
        return (
            not any(self._empty)
            and all(map(is_, map(type, self._modules), self._kinds))
            and all(same(own.values(), known) for own, known in self._known)
            and self._contents.unchanged()
            and self._numbers.unchanged()
        )

    def change(self) -> str | None:
        """Say what is another object or number now, or ``None``."""
        for path, now, known in self._tables:
            for name in {**known, **now}:
                if name not in known or name not in now or not alike(now[name], known[name]):
                    return of_the_model(_joined(path, name))
        pairs = zip(self._modules, self._kinds, strict=True)
        kind = next((kind for module, kind in pairs if type(module) is not kind), None)
        if kind is not None:
            return f"the class of a {kind.__name__} of the model"
        return self._contents.change() or self._numbers.change()


class HostState:
    """What the host keeps of a model, and of the functions around it, between two steps.

    ``others``: the loss, metrics and penalty: what they hold and what they close over, a few levels deep.
    ``elsewhere``: whether steps compute on another device than the CPU.
    """

    def __init__(self, model: nn.Module, others: Sequence[Any] = (), elsewhere: bool = False) -> None:
        self._held = _Held(model, others, _DEPTH_AROUND, elsewhere)

    def change(self) -> str | None:
        """Say what has changed since it was made, or what could not be looked at, or ``None``."""
        changed = self._held.change()
        return f"{changed} changes from one step to the next" if changed else self._held.failed


class _OnHost:
    """Numbers of tensors on the CPU, each with its place in words.

    Work on another device takes them as they are when it is recorded, and what changes them is done by the host.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        own = [(name, t) for name, t in named if t.device.type == "cpu" and not t.is_inference()]
        self._names, self._tensors = [name for name, _ in own], [tensor for _, tensor in own]
        self._known = self._now()

    def unchanged(self) -> bool:
        """Whether none was written, or says the same."""
        return not self._tensors or same(self._now(), self._known)

    def change(self) -> str | None:
        """Say which says something else, or ``None``."""
        triples = zip(self._names, self._now(), self._known, strict=True)
        return next((f"the numbers of {name}" for name, a, b in triples if not alike(a, b)), None)

    def _now(self) -> list[Any]:
        # Of more than one number how often they were written: a few are seen, many are as cheap.
        return [tensor.item() if tensor.dim() == 0 else tensor._version for tensor in self._tensors]


class _Placed:
    """Where tensors lie, each with its place in words. Those without an address do not count."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        placed = {id(tensor): (name, tensor) for name, tensor in named if _has_address(tensor)}
        self._names, self._tensors = [n for n, _ in placed.values()], [t for _, t in placed.values()]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]

    def unchanged(self) -> bool:
        """Whether all lie in the same memory."""
        return [*map(Tensor.data_ptr, self._tensors)] == self._addresses

    def change(self) -> str | None:
        """Say which lies elsewhere now, or ``None``."""
        now = map(Tensor.data_ptr, self._tensors)
        pairs = zip(self._names, now, self._addresses, strict=True)
        return next((f"the memory of {name}" for name, a, b in pairs if a != b), None)


class _Trained:
    """Hooks of parameters and of their optimizer, and its state."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer | None) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._hooks, self._state = self._hooks_now(), self._state_now()
        tables = [table for table in self._hooks if table is not None]
        self._contents = Contents([Root(table, lambda _: _HOOKS) for table in tables])
        self.tensors = [(_STATE, value) for value in self._state if isinstance(value, Tensor)]

    def unchanged(self) -> bool:
        """Whether the same hooks are there, which say the same, and the same objects in the state."""
        return same(self._state_now(), self._state) and self._same_hooks() and self._contents.unchanged()

    def change(self) -> str | None:
        """Say what is another one now, or ``None``."""
        if not same(self._state_now(), self._state):
            return _STATE
        return None if self._same_hooks() and self._contents.unchanged() else _HOOKS

    def _same_hooks(self) -> bool:
        # One table for as long as a parameter lives, but for the time before its first hook.
        pairs = zip(self._hooks_now(), self._hooks, strict=True)
        return all(now is known or not (now or known) for now, known in pairs)

    def _hooks_now(self) -> list[Any]:
        own = {} if self._optimizer is None else vars(self._optimizer)
        before = [parameter._backward_hooks for parameter in self._parameters]
        after = [parameter._post_accumulate_grad_hooks for parameter in self._parameters]
        return [*map(own.get, _HOOKS_OF_OPTIMIZERS), *before, *after]

    def _state_now(self) -> list[Any]:
        state = {} if self._optimizer is None else self._optimizer.state
        return [value for entries in state.values() for value in entries.values()]


class Attributes:
    """Which objects the modules of a model hold as attributes, buffers and modules, which hooks there are, and where
    parameters, buffers and other tensors lie: a cheap look for every step.

    Whoever changes one between two steps means the next step to follow. ``Module.to`` leaves a parameter the same
    object in other memory, so that one that went away and came back is seen by its address alone.
    ``around``: functions and objects that a step calls beside the model; ``optimizer``: where its step is recorded,
    which its state and its hooks are a part of; ``elsewhere``: whether steps compute on another device than the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        around: Sequence[Any] = (),
        optimizer: torch.optim.Optimizer | None = None,
        elsewhere: bool = False,
    ) -> None:
        self._held = _Held(model, around, DEPTH, elsewhere)
        parameters = [*model.parameters()]
        self._trained = _Trained(parameters, optimizer)
        own = ((of_the_model(name), t) for name, t in [*model.named_parameters(), *model.named_buffers()])
        self._placed = _Placed([*own, *self._held.tensors, *self._trained.tensors])

    def unchanged(self) -> bool:
        """Whether all of them are the same objects, in the same memory, or the same numbers."""
        return self._placed.unchanged() and self._held.unchanged() and self._trained.unchanged()

    def change(self) -> str | None:
        """Say what of them is another one now, or ``None``."""
        return self._held.change() or self._trained.change() or self._placed.change()


def of_the_model(path: str) -> str:
    """Write where something lies in a model."""
    return f"{path!r} of the model"


def _functions_of(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """Yield the functions of classes of the user's that close over something: beside their own class."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if is_the_users(base.__module__))
    for value in (value for base in bases for value in vars(base).values()):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if type(function) is FunctionType and {*function.__code__.co_freevars} - {"__class__"}:
            yield function


def _kept(title: str, path: str) -> str:
    return f"what {title} keeps" + (f" ({path})" if path else "")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _title(value: Any) -> str:
    # Objects of the user's may have any way of answering.
    name = value.__name__ if isinstance(value, FunctionType) else type(value).__name__
    return str(name)


def _is_ours(value: Any) -> bool:
    return str(type(value).__module__).partition(".")[0] == "kway"


def _has_address(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        # Sparse ones have none, as little as those that stand for several.
        return False
