"""Plain attributes that a forward pass changes, such as a count, where a batch is computed in pieces.

As for buffers (``kept_buffers``): each piece starts from what the step began with, and the step leaves what its first
piece left, so that a count moves once a step on every number of devices.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import nn

from kway.step.alike import alike
from kway.step.plain_attributes import GONE, Noted, is_plain

# By number of the module.
Left = dict[int, dict[str, Any]]


class _OfEnum(NamedTuple):
    """One of an enum, for a rank that has its class: other processes may not be able to import that."""

    value: Any


class KeptAttributes:
    """Attributes of a model's modules over the pieces of a batch, which go by ``piece``.

    ``doubts``: gets a line, once, for one that follows the samples of a piece.
    """

    def __init__(self, piece: str, doubts: list[str]) -> None:
        self._piece, self._doubts, self._has_doubt = piece, doubts, False
        self._modules: Sequence[nn.Module] = ()
        self._noted: list[Noted] = []
        self._left: Left | None = None

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Take the values from which every piece of a step starts. ``modules``: of the model, as they are now."""
        if modules is not self._modules:
            self._modules, self._noted = modules, [Noted(module) for module in modules]
        for place, noted in enumerate(self._noted):
            if not noted.unchanged() or vars(modules[place]) is not noted.own:
                self._noted[place] = Noted(modules[place])
            self._noted[place].note_others()
        self._left = None

    def end_of_piece(self) -> None:
        """Put the step's values back."""
        left: Left = {}
        for place, noted in enumerate(self._noted):
            if not noted.unchanged() and (found := noted.left()):
                left[place] = found
                noted.put_back([*found])
        if self._left is None:
            self._left = left
        elif not self._has_doubt and (what := self._differs(self._left, left)):
            self._has_doubt = True
            self._doubts.append(
                f"attribute {what} follows the samples of a {self._piece}: it keeps what the first one of each device "
                "left. Where the output follows it, so does the number of devices"
            )

    def told(self) -> Left | None:
        """Return what a rank without samples has to know; ``None`` where this one computed no piece."""
        if self._left is None:
            return None
        return {
            place: {name: _sent(value) for name, value in found.items() if is_plain(value)}
            for place, found in self._left.items()
        }

    def end_of_step(self, told: Left | None = None) -> None:
        """Give the attributes what the first piece left. ``told``: by another rank, which counts without one."""
        left = self._left
        if left is None:
            left = {
                place: {
                    name: _taken(value, self._noted[place].plain.get(name)) for name, value in found.items()
                }
                for place, found in (told or {}).items()
            }
        for place, values in left.items():
            self._noted[place].give(values)
        self._left = None

    def _differs(self, first: Left, second: Left) -> str | None:
        for place in {**first, **second}:
            ours, others = first.get(place, {}), second.get(place, {})
            for name in {**ours, **others}:
                one, other = ours.get(name, GONE), others.get(name, GONE)
                plain = [is_plain(value) or value is GONE for value in (one, other)]
                if all(plain) and not alike(one, other):
                    return f"{name!r} of {type(self._modules[place]).__name__}"
        return None


def _sent(value: Any) -> Any:
    return _OfEnum(value.value) if isinstance(value, Enum) else value


def _taken(value: Any, before: Any) -> Any:
    if isinstance(value, _OfEnum):
        return type(before)(value.value) if isinstance(before, Enum) else before
    return value
