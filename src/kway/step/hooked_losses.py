"""A loss module that hooks of the model write into: they know no copy of it."""

import copy
from typing import Any

from torch import nn

from kway.step.copying import computed
from kway.step.reach import CONTAINERS, reached


def loss_beside(model: nn.Module, loss: Any) -> Any:
    """Return what a run that trains this very ``model`` calls as its loss: of a module a copy.

    One that hooks of the model write into is returned as it is, and so is what is no module.
    """
    if not isinstance(loss, nn.Module) or knows(model, loss):
        return loss
    return copy.deepcopy(loss, computed([loss]))


def knows(model: nn.Module, loss: nn.Module) -> bool:
    """Whether ``model`` leads to ``loss``, a module inside of it or a container there, which its hooks may fill.

    What is a part of the model as well does not count.
    """
    own = {id(module) for module in model.modules()}
    inside = [module for module in loss.modules() if id(module) not in own]
    held = (value for module in inside for value in vars(module).values())
    sought = {id(module) for module in inside} | {id(value) for value in held if type(value) in CONTAINERS}
    return any(id(value) in sought for value in reached([model]))
