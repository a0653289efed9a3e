"""Which modules and parameters a model consists of, and a look at whether it still does that is cheap enough for each
step.
"""

from operator import is_
from typing import Any

from torch import nn

_WALKS = ("named_parameters", "modules", "named_modules", "children", "named_children")


class Roster:
    """The modules and parameters of a model at one moment, and which of the parameters are trained."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # By name, as the optimizer gets them: a model may have a ``parameters`` of its own that gives only some.
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        self.modules = list(model.modules())
        self._trained = [parameter.requires_grad for parameter in self.parameters]
        # What a module holds is in two dicts of its own: to look there takes a tenth of a walk through the model.
        self._plain = all(map(_is_plain, self.modules))
        held = [own for module in self.modules for own in _children(module)] if self._plain else []
        self._held = [(own, [*own.values()]) for own in held]

    def stands(self) -> bool:
        """Whether the model still consists of the same modules and parameters, of which the same are trained."""
        if not self._plain:
            now = Roster(self._model)
            same = len(now.modules) == len(self.modules) and all(map(is_, now.modules, self.modules))
            return same and now.has_parameters_of(self)
        held = [own for module in self.modules for own in _children(module)]
        return all(
            now is own and len(own) == len(known) and all(map(is_, own.values(), known))
            for now, (own, known) in zip(held, self._held, strict=True)
        ) and all(
            parameter.requires_grad == trained
            for parameter, trained in zip(self.parameters, self._trained, strict=True)
        )

    def has_parameters_of(self, other: "Roster") -> bool:
        """Whether both have the same parameters, in the same order, of which the same are trained."""
        return (
            len(self.parameters) == len(other.parameters)
            and all(map(is_, self.parameters, other.parameters))
            and self._trained == other._trained
        )


def _is_plain(module: nn.Module) -> bool:
    """Whether a module holds its parts as nn.Module does. Traced ones do not, and some have walks of their own."""
    own = vars(module)
    there = "_parameters" in own and "_modules" in own
    return there and not any(
        name in own or getattr(type(module), name) is not getattr(nn.Module, name) for name in _WALKS
    )


def _children(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    own = vars(module)
    return own["_parameters"], own["_modules"]
