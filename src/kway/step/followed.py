"""A loss module of the user's, as it is at each step: a loop may change it, as for a schedule of its weights."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_VALUES = (bool, int, float, complex, str, type(None))


class Followed:
    """A copy of ``source`` on ``device``, its tensors of dtype ``floating`` where that is given.

    ``prepare`` changes the copy. The user's own stays where it is, and as it is.
    """

    def __init__(
        self,
        source: nn.Module,
        device: torch.device,
        floating: torch.dtype | None,
        prepare: Callable[[nn.Module], None] = lambda module: None,
    ) -> None:
        self._source, self._device, self._floating, self._prepare = source, device, floating, prepare
        self._seen = _looks(source)
        self.module = self._copy()

    def changed(self) -> bool:
        """Whether the user's own was changed since the last time; then ``module`` is a new copy."""
        now = _looks(self._source)
        if now == self._seen:
            return False
        self._seen, self.module = now, self._copy()
        return True

    def _copy(self) -> nn.Module:
        made = copy.deepcopy(self._source).to(device=self._device, dtype=self._floating)
        self._prepare(made)
        return made


def _looks(source: nn.Module) -> list[Any]:
    """Return what is other after a change: numbers and texts by value, tensors by version, the rest by identity."""
    return [_look(value) for module in source.modules() for value in _held(module)]


def _held(module: nn.Module) -> list[Any]:
    own = vars(module)
    plain = [value for name, value in own.items() if name not in {"_parameters", "_buffers", "_modules"}]
    return [*plain, *own["_parameters"].values(), *own["_buffers"].values()]


def _look(value: Any) -> Any:
    if isinstance(value, _VALUES):
        # By text: a NaN is itself.
        return repr(value)
    return (id(value), value._version) if isinstance(value, torch.Tensor) else id(value)
