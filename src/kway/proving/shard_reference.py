"""The reference for level bits: a plain torch loop over the micro-shards of a batch on one device.

Batch normalisation sees a shard at a time; its running statistics move once a step, by the mean and the
unbiased variance of all values that the layer saw in the step. Other buffers start every shard from the step's own,
and so do attributes of modules, of which the step leaves those of its first shard.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kway.job import Job
from kway.proving.attributes import attributes_of, give_back
from kway.proving.reference import Held, Reference, buffers_of
from kway.step.inputs import move

Tensor = torch.Tensor
# Mean, variance and the number of batches.
_Running = tuple[Tensor | None, Tensor | None, Tensor | None]


class ShardReference(Reference):
    """A plain loop whose batches are lists of shards (without empty ones)."""

    def __init__(self, job: Job, model: nn.Module, device: torch.device) -> None:
        super().__init__(job, model, device)
        self._norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]

    def forward(self, batch: Sequence[Any]) -> tuple[Any, Any]:
        """Return outputs and targets of all shards, joined along the samples (or the sums of both parts of a
        pair that the model itself returns).
        """
        outputs, targets = [], []
        seen: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in self._norms}
        before = {norm: _running(norm) for norm in self._norms}
        start, attributes = buffers_of(self.model), attributes_of(self.model)
        left = attributes
        hooks = [norm.register_forward_pre_hook(_note(seen[norm])) for norm in self._norms]
        versions = _versions(self.model)
        for shard in batch:
            _renew(start)
            # A flag that says that a weight was set stays with the weight.
            if versions == _versions(self.model):
                give_back(attributes)
            args, kwargs, target = self.split(move(shard, self.device, self.floating))
            outputs.append(self.model(*args, **kwargs))
            targets.append(target)
            left = attributes_of(self.model) if len(targets) == 1 else left
        if versions == _versions(self.model):
            give_back(left)
        for hook in hooks:
            hook.remove()
        for norm, values in seen.items():
            _update(norm, before[norm], values)
        if self.loss is None:
            return (sum(output[0] for output in outputs), sum(output[1] for output in outputs)), None
        return _joined(outputs), _joined(targets)


def _note(values: list[Tensor]) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        seen = args[0].detach().transpose(0, 1).flatten(1)
        values.append(seen.to(torch.promote_types(torch.float32, seen.dtype)))

    return hook


def _renew(start: Held) -> None:
    # New tensors, not new values: the graph of an earlier shard may hold the ones that it saw.
    for module, buffers in start:
        module._buffers.clear()
        module._buffers.update({n: None if v is None else v.clone() for n, (_, v) in buffers.items()})


def _versions(model: nn.Module) -> list[int]:
    return [parameter._version for parameter in model.parameters()]


def _running(norm: _BatchNorm) -> _Running:
    """Return copies of what a layer keeps. A model may have set some of it to ``None``, which torch then leaves out."""
    held = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    mean, var, tracked = (None if value is None else value.clone() for value in held)
    return mean, var, tracked


@torch.no_grad()
def _update(norm: _BatchNorm, before: _Running, values: list[Tensor]) -> None:
    mean, var, tracked = before
    if not values:
        return
    every = torch.cat(values, dim=1)
    if tracked is not None:
        norm.num_batches_tracked = tracked + 1
    # Without a counter there is no average over all batches, and torch moves nothing.
    average = 0.0 if tracked is None else 1.0 / float(tracked + 1)
    factor = average if norm.momentum is None else norm.momentum
    if mean is not None:
        norm.running_mean = (1 - factor) * mean + factor * every.mean(1)
    if var is not None:
        norm.running_var = (1 - factor) * var + factor * every.var(1, unbiased=True)


def _joined(pieces: list[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, Tensor):
        sizes = [{piece.shape[place] for piece in pieces} for place in range(first.dim())]
        # Where shards of other sizes differ is where the samples lie; equal ones may be joined along any.
        along = next((place for place, found in enumerate(sizes) if len(found) > 1), 0)
        return torch.cat(pieces, along)
    if isinstance(first, Mapping):
        return {key: _joined([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(_joined([piece[at] for piece in pieces]) for at in range(len(first)))
    return first
