"""Batch normalisation for fixed micro-shards: each normalises by itself, and a step updates the running
statistics once, from the statistics of all shards, weighted by their counts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kway.comm.group import Group
from kway.step.batchnorm import replaceable_layers, update_running
from kway.step.checkpointing import recomputing
from kway.step.normalise import Statistics, local_statistics, pool

Tensor = torch.Tensor


class ShardStatistics:
    """Collects what each layer saw in each shard of a step. ``shard`` is the one being computed."""

    def __init__(self, found: list[tuple[str, _BatchNorm]], shards: int, device: torch.device) -> None:
        self.layers = [module for _, module in found]
        self.shard = 0
        widths = [2 * module.num_features + 1 for module in self.layers]
        self._rows = torch.zeros(shards, sum(widths), dtype=torch.float64, device=device)
        self._columns = list(torch.split(self._rows, widths, dim=1))

    def clear(self) -> None:
        """Forget the last step."""
        self._rows.zero_()

    def note(self, place: int, x: Tensor) -> None:
        """Add what layer number ``place`` sees: x of shape (N, C, ...)."""
        channels = x.size(1)
        mean, var = local_statistics(x)
        count = x.numel() // channels
        seen = self._columns[place][self.shard]
        now = torch.cat([mean.double(), var.double(), mean.new_full((1,), count, dtype=torch.float64)])
        both = pool(torch.stack([seen, now]))
        seen[:channels], seen[channels:-1], seen[-1] = both.mean, both.var, both.count

    def finish(self, group: Group) -> None:
        """Update the running statistics from all shards. A collective.

        Every entry is written by one rank and zero on the others: the sum is exact in any order.
        """
        if not self.layers:
            return
        group.sum_(self._rows)
        for module, rows in zip(self.layers, self._columns, strict=True):
            if module.track_running_stats and bool(rows[:, -1].any()):
                statistics: Statistics = pool(rows)
                update_running(module, statistics)


@contextmanager
def per_shard(model: nn.Module, shards: int, device: torch.device) -> Iterator[ShardStatistics]:
    """While open, training passes of ``model`` note batch statistics by shard and leave the running ones alone."""
    found = replaceable_layers(model)
    statistics = ShardStatistics(found, shards, device)

    def forward_of(place: int, module: _BatchNorm) -> Callable[[Tensor], Tensor]:
        plain = type(module).forward

        def forward(x: Tensor) -> Tensor:
            if not module.training:
                return plain(module, x)
            module._check_input_dim(x)  # type: ignore[no-untyped-call]
            if x.numel() <= x.size(1):
                raise ValueError(
                    f"batch normalisation needs more than 1 value a channel to train, and shard "
                    f"{statistics.shard} has 1 (input {tuple(x.shape)}): use a larger batch or fewer shards"
                )
            if not recomputing():
                statistics.note(place, x)
            return nn.functional.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)

        return forward

    for place, (_, module) in enumerate(found):
        vars(module)["forward"] = forward_of(place, module)
    try:
        yield statistics
    finally:
        for _, module in found:
            vars(module).pop("forward", None)
