"""An optimizer's state by the names of the parameters, handed over within a run."""

from collections.abc import Mapping

import torch
from torch import nn

from kway.step.gradients import dense


def held_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return copies of an optimizer's tensors and numbers as ``NAME/KEY``, dense tensors on the CPU."""
    found = {}
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, int | float):
                wide = torch.float64 if isinstance(value, float) else None
                found[f"{name}/{entry}"] = torch.tensor(value, dtype=wide)
            elif isinstance(value, torch.Tensor):
                found[f"{name}/{entry}"] = dense(value.detach()).cpu().clone()
    return found


@torch.no_grad()
def load_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, torch.Tensor],
) -> bool:
    """Give an optimizer the state ``NAME/KEY``; what it holds beyond that is dropped.

    Values are written where the old ones lie, so that work recorded of them stays true. Return whether that could
    not be done for all.
    """
    held = {(id(parameter), key) for parameter, own in optimizer.state.items() for key in own}
    moved = False
    on_device = {id(p) for group in optimizer.param_groups if _counts_there(group) for p in group["params"]}
    for path, value in state.items():
        name, key = path.rsplit("/", 1)
        parameter = parameters[name]
        own = optimizer.state[parameter]
        held.discard((id(parameter), key))
        old = own.get(key)
        if isinstance(old, torch.Tensor) and _form(old) == _form(value):
            old.copy_(value)
            continue
        moved = True
        # Step counters live on the CPU in most optimizers, as small tensors of another shape.
        there = value.shape == parameter.shape or id(parameter) in on_device
        place = parameter.device if there else torch.device("cpu")
        # An optimizer that counts its steps in a plain number (SparseAdam does) gets one back.
        number = value.dtype == torch.int64 and not value.dim()
        own[key] = int(value) if number else value.to(place).clone()
    for holder, own in [*optimizer.state.items()]:
        for key in [key for key in own if (id(holder), key) in held]:
            del own[key]
            moved = True
        if not own:
            del optimizer.state[holder]
    return moved


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.layout


def _counts_there(group: Mapping[str, object]) -> bool:
    """Whether the optimizer wants its step counters beside the parameters."""
    return bool(group.get("capturable") or group.get("fused"))
