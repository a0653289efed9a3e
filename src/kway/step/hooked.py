"""Hooks of the user's own on gradients: they act on the gradient of a part of the batch.

On one device that computes a batch as a whole a hook gets the batch's gradient. Where the batch is cut, over devices or
in time, autograd calls it for each part before anything is summed, with numbers of another magnitude. On a parameter
that is refused. On a layer it may be right: what it gets is the gradient by the layer's output or input, of which each
sample has a row, as large as on one device where all samples weigh the same (``StepCore.nominal``).
"""

from torch import nn

from kway.errors import RefusedError
from kway.launch.parameter_hooks import hooks_on
from kway.units import counted


def refuse_hooks(model: nn.Module, cut: str | None, level: str) -> None:
    """Raise ``RefusedError`` for a trained parameter with a hook on its gradient, where a batch is cut.

    ``cut``: how (over 2 devices), or ``None`` where it is computed as a whole; ``level``: the level that could not be
    kept. What kway itself hangs on parameters is there during a step only.
    """
    if cut is None:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and hooks_on(parameter):
            raise RefusedError(
                f"parameter {name!r} has a hook on its gradient, and the batch is cut {cut}",
                f"at exactness {level} it must act on the gradient of the global batch, not on that of a part",
                "use clip= to limit the gradient, or one device that computes a batch as a whole, or exactness "
                "loose for a hook that is linear in the gradient (a mask, a factor) or only looks on",
            )


def hooked_layers(model: nn.Module, cut: str | None) -> list[str]:
    """Return a line for the user where layers have hooks on backward and a batch is ``cut`` as there; else none.

    kway itself hangs none on layers.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    if cut is None or not found:
        return []
    name, module = found[0]
    where = f"layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    others = f" and {counted(len(found) - 1, 'other layer')}" if found[1:] else ""
    return [
        f"{where}{others}: a hook on backward, where the batch is cut {cut}, gets the gradient of a part, up to a "
        "factor where samples weigh differently; one that is not linear in the gradient (it goes by a norm, or limits "
        "it) may change the result: kway prove tells"
    ]
