"""Plain attributes of modules: numbers, texts, flags, ``None`` and enums that the user's code keeps beside tensors."""

from collections.abc import Iterator, Sequence
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from kway.step.alike import PLAIN, alike
from kway.step.holders import is_the_users

# What every module has, ``training`` among it.
OF_TORCH = frozenset(vars(nn.Module()))
_NAMED = 3


class Gone:
    """Stands for an attribute that is not there."""

    def __reduce__(self) -> str:
        # Also in another process, and in a copy, there is one alone.
        return "GONE"


GONE = Gone()


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a flag, ``None`` or one of an enum: nothing that can change in itself."""
    kind = type(value)
    return kind in PLAIN or issubclass(kind, Enum | np.generic)


class Noted:
    """The attributes of a module at one moment. ``of_user``: whether its class is neither torch's nor kway's."""

    def __init__(self, module: nn.Module) -> None:
        self.own, self.of_user = vars(module), is_the_users(type(module).__module__)
        self._names, self._parts = frozenset(self.own), _parts(self.own)
        self.plain = {n: v for n, v in self.own.items() if n not in OF_TORCH and is_plain(v)}
        self._others: dict[str, Any] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    def note_others(self) -> None:
        """Note which other objects the user's class holds, but for those of a forward pass; and tensors as they are."""
        if self.of_user:
            skipped = OF_TORCH | self.plain.keys()
            self._others = {n: v for n, v in self.own.items() if n not in skipped and not _of_a_pass(v)}
        held = (v for v in (*self._others.values(), *self._parts.values()) if isinstance(v, torch.Tensor))
        self._versions = [(tensor, tensor._version) for tensor in held if not tensor.is_inference()]

    def is_written(self) -> bool:
        """Whether a parameter, or a tensor in an attribute, has been written into since then."""
        return any(tensor._version != version for tensor, version in self._versions)

    def unchanged(self) -> bool:
        """Whether its plain attributes are the same objects, and there are no others: a cheap look."""
        # Their number is a tenth of the time, and does for torch's own classes, of which none takes a name away.
        same = self.own.keys() == self._names if self.of_user else len(self.own) == len(self._names)
        return same and all(map(is_, map(self.own.get, self.plain), self.plain.values()))

    def has_other_parts(self) -> bool:
        """Whether parameters or modules in it have been added, replaced or taken away."""
        now = _parts(self.own)
        return now.keys() != self._parts.keys() or not all(now[n] is part for n, part in self._parts.items())

    def moved(self) -> dict[str, Any]:
        """Return by name which plain attributes say something else now, ``GONE`` where they are not there any more."""
        now = {name: self.own.get(name, GONE) for name in self.plain}
        found = {
            name: value
            for name, value in now.items()
            if (is_plain(value) and not alike(value, self.plain[name]))
            or (value is GONE and not self._in_a_table(name))
        }
        new = [name for name in self.own if name not in self._names and name not in OF_TORCH]
        return found | {name: self.own[name] for name in new if is_plain(self.own[name])}

    def left(self) -> dict[str, Any]:
        """Return what ``moved`` does, and where that is anything what else was assigned or deleted: what is made once
        (a table) goes with what says so (its length).
        """
        found = self.moved()
        if not found:
            return found
        known = {**self.plain, **self._others}
        for name, value in self.own.items():
            new = name not in self._names and name not in OF_TORCH
            if (new or (name in known and known[name] is not value)) and not _of_a_pass(value):
                found.setdefault(name, value)
        for name in self._others.keys() - self.own.keys():
            if not self._in_a_table(name):
                found[name] = GONE
        return found

    def put_back(self, names: Sequence[str]) -> None:
        """Give attributes of ``left`` the values that they had."""
        known = {**self.plain, **self._others}
        self.give({name: known.get(name, GONE) for name in names})

    def give(self, values: dict[str, Any]) -> None:
        """Give attributes values, without a call of anything of the user's."""
        for name, value in values.items():
            if value is GONE:
                self.own.pop(name, None)
            elif not self._in_a_table(name):
                self.own[name] = value

    def _in_a_table(self, name: str) -> bool:
        """Whether a buffer, a parameter or a module has taken the place of an attribute, which would hide it."""
        return any(name in self.own.get(table, ()) for table in ("_parameters", "_buffers", "_modules"))


class SinceThen:
    """What a run's checkpoints do not hold: plain attributes of the user's modules that have changed since it began.

    Of numbers and texts those that go on changing after the first step: what a cache notes is made anew. A flag counts
    at once: it may say that weights have been set.
    """

    def __init__(self, model: nn.Module) -> None:
        self._noted = [(type(module).__name__, Noted(module)) for module in _without_extra_state(model)]
        self._settled: dict[int, Noted] | None = None
        self._said = False

    def settle(self, model: nn.Module) -> None:
        """Take what there is after the first step for what numbers and texts settle on."""
        if self._settled is None:
            noted = map(Noted, _without_extra_state(model))
            self._settled = {id(each.own): each for each in noted}

    def lines(self) -> list[str]:
        """Return what is to be said of them, once."""
        if self._said:
            return []
        pairs = [(name, kind) for kind, noted in self._noted for name in self._told(noted)]
        found = [f"{name!r} of {kind}" for name, kind in dict.fromkeys(pairs)]
        if not found:
            return []
        self._said = True
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return [
            f"attributes of the model have changed since the run began ({', '.join(found[:_NAMED])}{more}), which no "
            "checkpoint holds: a run that goes on begins with what the model is built with. Where the output follows "
            "them, register buffers"
        ]

    def _told(self, noted: Noted) -> list[str]:
        moved = {} if noted.unchanged() else noted.moved()
        settled = (self._settled or {}).get(id(noted.own))
        goes_on = settled.moved() if moved and settled is not None else {}
        return [name for name, value in moved.items() if isinstance(value, bool) or name in goes_on]


def _without_extra_state(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules of the user's classes but those that may save what they keep by themselves (``get_extra_state``),
    and those inside.
    """
    saving = [
        f"{path}." if path else ""
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    for path, module in model.named_modules():
        inside = any(f"{path}.".startswith(prefix) for prefix in saving)
        if not inside and is_the_users(type(module).__module__):
            yield module


def _parts(own: dict[str, Any]) -> dict[str, Any]:
    # Those of a scripted module are no dicts.
    tables = [own.get(name) for name in ("_parameters", "_modules")]
    return {name: part for table in tables if isinstance(table, dict) for name, part in table.items()}


def _of_a_pass(value: Any) -> bool:
    # It holds a graph, of which nothing can be used again.
    return isinstance(value, torch.Tensor) and value.requires_grad
