"""What users choose by name on the command line: losses and optimizers."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from kway.cli._objects import OWN, is_reference, load_object
from kway.errors import UsageError
from kway.registry import known

DEFAULT_LR = 0.1
ADAPTIVE_LR = 0.001

LOSSES = {
    "cross-entropy": "CrossEntropyLoss",
    "mse": "MSELoss",
    "l1": "L1Loss",
    "smooth-l1": "SmoothL1Loss",
    "huber": "HuberLoss",
    "bce-with-logits": "BCEWithLogitsLoss",
    "nll": "NLLLoss",
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
}
_ADAPTIVE = ("adam", "adamw", "rmsprop")


def loss_of(name: str) -> Any:
    """Return a loss by name, or the user's own. Raises ``UsageError``."""
    if is_reference(name):
        return _called_if_class("--loss", name)
    kind = known("loss", name, LOSSES, OWN)
    from torch import nn

    return getattr(nn, kind)()


def optimizer_of(name: str, lr: float | None) -> tuple[Callable[..., Any], str]:
    """Return an optimizer factory by name, or the user's own, and how to print it. Raises ``UsageError``."""
    if lr is not None and not 0 <= lr < math.inf:
        raise UsageError(
            f"--lr {lr:g}", "it must be a finite number of at least 0", "leave it out for the usual one"
        )
    if is_reference(name):
        own = load_object("--optimizer", name)
        if not callable(own):
            raise UsageError(
                f"--optimizer {name} is of type {type(own).__name__}",
                "it is called with the model's named parameters",
                "name a class of optimizers, or a function that makes one",
            )
        return (own if lr is None else partial(own, lr=lr)), name if lr is None else f"{name}, lr {lr:g}"
    kind, options = known("optimizer", name, OPTIMIZERS, OWN)
    rate = lr if lr is not None else ADAPTIVE_LR if name in _ADAPTIVE else DEFAULT_LR
    from torch import optim

    return partial(getattr(optim, kind), lr=rate, **options), f"{name}, lr {rate:g}"


def _called_if_class(what: str, name: str) -> Any:
    found = load_object(what, name)
    if not callable(found):
        raise UsageError(
            f"{what} {name} is of type {type(found).__name__}",
            "it is called with output and target",
            "name a function, a loss module or its class",
        )
    if not isinstance(found, type):
        return found
    from kway.step.build import called

    return called(f"{what} {name}", found, do="name a function, or an object that is already made")
