"""A loss module of the user's, as it is at each step: a loop may change it, as for a schedule of its weights."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_VALUES = (bool, int, float, complex, str, type(None))
_TABLES = ("", "_parameters", "_buffers")
Key = tuple[int, str, str]


class Followed:
    """A copy of ``source`` on ``device``, its tensors of dtype ``floating`` where that is given.

    ``prepare`` changes the copy. The user's own stays where it is, and as it is. What the copy has changed by itself
    stays, too: only what is another in the user's own is taken over. What is written through ``.data`` is not seen.
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
        self.module = copy.deepcopy(source).to(device=device, dtype=floating)
        prepare(self.module)

    def changed(self) -> bool:
        """Whether the user's own was changed since the last time; ``module`` then has what changed there."""
        now = _looks(self._source)
        other = [key for key in {**self._seen, **now} if self._seen.get(key, self) != now.get(key, self)]
        if not other:
            return False
        self._seen = now
        own, held = list(self._source.modules()), list(self.module.modules())
        for number, table, name in other:
            if number < min(len(own), len(held)):
                self._take_over(_table(own[number], table), _table(held[number], table), name)
        self._prepare(self.module)
        return True

    def _take_over(self, own: dict[str, Any], held: dict[str, Any], name: str) -> None:
        if name not in own:
            held.pop(name, None)
            return
        value = copy.deepcopy(own[name])
        if isinstance(value, torch.Tensor):
            dtype = self._floating if value.is_floating_point() else None
            moved = value.detach().to(device=self._device, dtype=dtype)
            value = nn.Parameter(moved, value.requires_grad) if isinstance(value, nn.Parameter) else moved
        held[name] = value


class _Look:
    """A value as it was: plain ones by what they say, all others by which object and version it is, and held."""

    def __init__(self, value: Any) -> None:
        self._value, self._said = value, _said(value)
        self._version = value._version if isinstance(value, torch.Tensor) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Look):
            return False
        if self._said is not None or other._said is not None:
            return self._said == other._said
        return self._value is other._value and self._version == other._version

    def __hash__(self) -> int:
        return hash((self._said, id(self._value)))


def _said(value: Any) -> str | None:
    """Return a text of a plain value, or of a container of plain ones; a NaN is itself there."""
    if isinstance(value, _VALUES):
        return repr(value)
    if isinstance(value, list | tuple | dict):
        inner = [*value, *(value.values() if isinstance(value, dict) else ())]
        said = [_said(item) for item in inner]
        return None if None in said else f"{type(value).__name__}{said}"
    return None


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    own = vars(module)
    return own[name] if name else own


def _looks(source: nn.Module) -> dict[Key, _Look]:
    """Return what may be changed in a module and those inside, by number of the module, table and name."""
    return {
        (number, table, name): _Look(value)
        for number, module in enumerate(source.modules())
        for table in _TABLES
        for name, value in _table(module, table).items()
        if table or name not in {"_parameters", "_buffers", "_modules"}
    }
