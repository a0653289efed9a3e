"""Hooks of the user's own on parameters: they would act on the gradient of a part of the batch.

On one device that computes a batch as a whole a hook gets the batch's gradient. Where the batch is cut, over devices or
in time, autograd calls it for each part before anything is summed, with numbers of another magnitude.
"""

from torch import nn

from kway.errors import RefusedError
from kway.launch.parameter_hooks import hooks_on


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
