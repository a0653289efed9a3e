"""Plain attributes that a forward pass changes, such as a count, where a batch is computed in pieces.

As for buffers (``kept_buffers``): each piece starts from what the step began with, and the step leaves what its first
piece left, so that a count moves once a step on every number of devices.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from kway.step.alike import alike
from kway.step.plain_attributes import GONE, Noted, is_plain
from kway.step.sent_values import OfEnum, can_be_sent, received, sent

# By number of the module.
Left = dict[int, dict[str, Any]]
# By path of the module: ranks may have added others since.
Told = dict[str, dict[str, Any]]


class KeptAttributes:
    """Attributes of a model's modules over the pieces of a batch, which go by ``piece``.

    ``doubts``: gets a line, once, for one that follows the samples of a piece, and for what cannot be told.
    """

    def __init__(self, piece: str, doubts: list[str]) -> None:
        self._piece, self._doubts, self._has_doubt = piece, doubts, False
        self._has_untold = False
        self._modules: Sequence[nn.Module] = ()
        self._noted: list[Noted] = []
        self._left: Left | None = None

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Take the values from which every piece of a step starts. ``modules``: the model first, as they are now."""
        if modules is not self._modules:
            self._modules, self._noted = modules, [Noted(module) for module in modules]
        for place, noted in enumerate(self._noted):
            if not noted.unchanged() or vars(modules[place]) is not noted.own:
                self._noted[place] = Noted(modules[place])
            self._noted[place].note_others()
        self._left = None

    def end_of_piece(self) -> None:
        """Put the step's values back.

        Not where the pass has written into a parameter of the model, or a tensor in an attribute: that cannot be taken
        back, and a flag that says that it was done has to stay, wherever in the model it is.
        """
        left: Left = {}
        changed = [place for place, noted in enumerate(self._noted) if not noted.unchanged()]
        if changed and any(noted.is_written() for noted in self._noted):
            changed = []
        for place in changed:
            noted = self._noted[place]
            if found := noted.left():
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

    def told(self) -> Told | None:
        """Return what a rank without samples has to know; ``None`` where this one computed no piece.

        Of a module all or nothing: of one that left a table with its length, the other makes both when it next runs.
        """
        if self._left is None:
            return None
        paths = {place: path for path, place in self._places().items()}
        told: Told = {}
        for place, found in self._left.items():
            noted = self._noted[place]
            alone = not noted.has_other_parts() and place in paths
            if alone and all(can_be_sent(value, noted.plain.get(name)) for name, value in found.items()):
                told[paths[place]] = {name: sent(value) for name, value in found.items()}
            else:
                self._say_untold(type(self._modules[place]).__name__)
        return told

    def end_of_step(self, told: Told | None = None) -> None:
        """Give the attributes what the first piece left. ``told``: by another rank, which counts without one."""
        left = self._left
        if left is None:
            left = self._taken(told) if told else {}
        for place, values in left.items():
            self._noted[place].give(values)
        self._left = None

    def _places(self) -> dict[str, int]:
        """Return the numbers of the step's modules by their paths."""
        places = {id(module): place for place, module in enumerate(self._modules)}
        named = self._modules[0].named_modules()
        return {path: places[id(module)] for path, module in named if id(module) in places}

    def _taken(self, told: Told) -> Left:
        """Return what was told of the modules that this rank has."""
        places, taken = self._places(), Left()
        for path, found in told.items():
            place = places.get(path)
            if place is None:
                continue
            before = self._noted[place].plain
            values = {name: received(value, before.get(name)) for name, value in found.items()}
            if not any(isinstance(value, OfEnum) for value in values.values()):
                taken[place] = values
        return taken

    def _say_untold(self, kind: str) -> None:
        if not self._has_untold:
            self._has_untold = True
            self._doubts.append(
                f"attributes of {kind} stay as they were on a device without samples, which cannot be told all that "
                "the others left there (only numbers, texts, flags, None and enums that it knows). Where the output "
                "follows them, so does the number of devices"
            )

    def _differs(self, first: Left, second: Left) -> str | None:
        for place in {**first, **second}:
            ours, others = first.get(place, {}), second.get(place, {})
            for name in {**ours, **others}:
                one, other = ours.get(name, GONE), others.get(name, GONE)
                plain = [is_plain(value) or value is GONE for value in (one, other)]
                if all(plain) and not alike(one, other):
                    return f"{name!r} of {type(self._modules[place]).__name__}"
        return None
