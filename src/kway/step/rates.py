"""Learning rates that lie on the device while an optimizer steps, so that a recorded step follows a schedule."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kway.step.gradients import sparse_parameters

# Of torch's own optimizers, those that count steps on the device and take a rate from there when they are asked to.
_CAPTURABLE = frozenset({"Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta"})
_SET_HERE = ("params", "lr", "capturable", "fused", "foreach", "param_names")


Options = list[dict[str, Any]]


def changed(before: Options, now: Options) -> list[str]:
    """Return the names of the options that differ between groups in the same place."""
    pairs = [(one, other) for one, other in zip(before, now, strict=False) if one != other]
    names = dict.fromkeys(name for one, other in pairs for name in {**one, **other})
    return [n for n in names if any(one.get(n) != other.get(n) for one, other in pairs) and n != "params"]


def _fixed(value: Any) -> Any:
    # A list may be changed where it is.
    return tuple(value) if isinstance(value, list) else value


class Rates:
    """The rates of an optimizer's groups: on the host for the schedule, on the device while the optimizer steps.

    ``outside``: why the optimizer's step cannot be recorded; ``""`` where it can.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        self.outside = _why_not(optimizer)
        if not self.outside and sparse_parameters(model):
            self.outside = "some gradients are sparse"
        self._cells: list[torch.Tensor] = []
        self._told: list[float] = []

    def adapt(self) -> None:
        """Let the optimizer keep on the device what changes with every step. Cheap where it does already."""
        if self.outside:
            return
        groups = self.optimizer.param_groups
        if len(self._cells) != len(groups):
            self._cells = [_cell(group) for group in groups]
            self._told = [float("nan")] * len(groups)
        for group in groups:
            if "capturable" in group and not group["capturable"]:
                group["capturable"] = True
                self._move_counters(group)
            elif "capturable" not in group and not group["fused"]:
                # SGD: only its fused kernel reads a rate from the device without waiting for it.
                group["fused"], group["foreach"] = True, False

    def fill(self) -> None:
        """Bring the rates that have changed to the device."""
        for place, group in enumerate(self.optimizer.param_groups if not self.outside else ()):
            rate = float(group["lr"])
            if rate != self._told[place]:
                self._cells[place].fill_(rate)
                self._told[place] = rate

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """While open, the optimizer reads its rates from the device."""
        if self.outside:
            yield
            return
        groups = self.optimizer.param_groups
        own = [group["lr"] for group in groups]
        for group, cell in zip(groups, self._cells, strict=True):
            group["lr"] = cell
        try:
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate

    def options(self) -> Options:
        """Return all other options of the optimizer by group, and of how many parameters it is: a recorded step holds
        them as they were.
        """
        if self.outside:
            return []
        return [
            {"params": len(group["params"]), **{k: _fixed(v) for k, v in group.items() if k not in _SET_HERE}}
            for group in self.optimizer.param_groups
        ]

    def _move_counters(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != parameter.device:
                    state[key] = value.to(parameter.device)


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
        return "its learning rate is a tensor already"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable"
    plain = type(optimizer).__module__.startswith("torch.optim.")
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if (plain and name == "SGD") or (plain and name in _CAPTURABLE and fused):
        # torch's fused kernels hold a rate in single precision.
        narrow = (torch.float32, torch.float16, torch.bfloat16)
        odd = next((p.dtype for p in parameters if p.dtype not in narrow), None)
        return f"{name} takes a rate from the device in single precision only, not for {odd}" if odd else ""
    if plain and name in _CAPTURABLE:
        return ""
    return f"{name} keeps on the host what changes with every step"


def _cell(group: dict[str, Any]) -> torch.Tensor:
    parameters = group["params"]
    double = bool(parameters) and all(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64 if double else torch.float32, device=device)
