"""Training and evaluation of a model's layers, some of which have a way of their own to change between the two."""

from collections.abc import Mapping

from torch import nn


def begin_training(model: nn.Module) -> nn.Module:
    """Set a model to training and return it. Layers that its factory has set to evaluation in a model that trains
    (``model.norm.eval()``: frozen statistics) stay so; a model that came in evaluation as a whole trains as a whole.
    """
    # Those in evaluation alone: the others may have a way of their own to begin, which takes them there now.
    modes = modes_of(model)
    kept = {module: mode for module, mode in modes.items() if modes[model] and not mode}
    model.train()
    set_modes(kept)
    return model


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Return which modules are in training, those around others first."""
    # A frozen part of TorchScript has none until it is told: it is in evaluation for good.
    return {module: getattr(module, "training", False) for module in model.modules()}


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Bring modules back to their modes, by their own ``train``: it may do more than to note the mode."""
    for module, mode in modes.items():
        if getattr(module, "training", False) != mode:
            module.train(mode)
    for module, mode in modes.items():
        module.training = mode
