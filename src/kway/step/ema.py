"""An exponential moving average of a model's parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from kway.checkpoints.names import own_names, own_state
from kway.step.precision import wide

Tensor = torch.Tensor


class MovingAverage:
    """The average of ``model``'s parameters, from their values at the time it is made.

    ``decay``: how much of the average a step keeps, between 0 and 1. Every rank averages what it holds by
    itself: parameters that are equal on all ranks have equal averages. Buffers are not averaged: running
    statistics are averages already, and counters have no average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self._averages: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Begin a new average at the parameters' present values, as after loading others."""
        before, self._averages = self._averages, {}
        for name, parameter in self.model.named_parameters():
            held = before.get(name)
            fits = held is not None and _fits(held, parameter)
            # Where the old one lies, so that work recorded of it stays true.
            self._averages[name] = (
                held.copy_(parameter.detach()) if held is not None and fits else _start(parameter)
            )

    def state(self) -> dict[str, Tensor]:
        """Return the averages by the parameters' own names; not copies."""
        return own_state(self.model, self._averages)

    def load(self, averages: dict[str, Tensor]) -> None:
        """Go on with averages that ``state`` gave. Names that the model lacks are left out."""
        parameters = dict(self.model.named_parameters())
        self._averages = {
            name: averages[own].to(parameters[name].device, copy=True)
            for name, own in own_names(self.model, parameters).items()
            if own in averages
        }

    @torch.no_grad()
    def update(self) -> None:
        """Move the average: ``average = decay * average + (1 - decay) * parameter``.

        A parameter that was added, or replaced by one of another shape or dtype, starts a new average.
        """
        averages: list[Tensor] = []
        values: list[Tensor] = []
        kept: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            start = self._averages.get(name)
            if start is None or not _fits(start, parameter):
                kept[name] = _start(parameter)
                continue
            kept[name] = start
            if not (start.is_floating_point() or start.is_complex()):
                start.copy_(parameter)
                continue
            value = parameter.detach().to(start.dtype)
            averages.append(torch.view_as_real(start) if start.is_complex() else start)
            values.append(torch.view_as_real(value.resolve_conj()) if value.is_complex() else value)
        self._averages = kept
        for dtype in {average.dtype: None for average in averages}:
            chosen = [place for place, average in enumerate(averages) if average.dtype == dtype]
            # As a step from the average towards the parameter: one that does not move keeps its bits.
            torch._foreach_lerp_(
                [averages[place] for place in chosen], [values[place] for place in chosen], 1 - self.decay
            )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """While open, the model's parameters hold their averages; afterwards what they held before, to the bit.

        A parameter that has no average yet stays as it is.
        """
        live = {
            parameter: parameter.detach().clone()
            for name, parameter in self.model.named_parameters()
            if name in self._averages and _fits(self._averages[name], parameter)
        }
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter in live:
                    parameter.copy_(self._averages[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in live.items():
                    parameter.copy_(value)


def _start(parameter: nn.Parameter) -> Tensor:
    """Copy a parameter, in single precision at least: a half would round small steps of the average away."""
    return parameter.detach().to(_average_dtype(parameter.dtype), copy=True)


def _fits(average: Tensor, parameter: nn.Parameter) -> bool:
    wanted = parameter.shape, _average_dtype(parameter.dtype), parameter.device
    return (average.shape, average.dtype, average.device) == wanted


def _average_dtype(dtype: torch.dtype) -> torch.dtype:
    return wide(dtype) if dtype.is_floating_point else dtype
