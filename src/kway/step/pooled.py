"""Batch normalisation for fixed micro-shards: each normalises by itself, and a step updates the running
statistics once, from the statistics of all shards, weighted by their counts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kway.comm.group import Group
from kway.step.batchnorm import count_batch, replaceable_layers
from kway.step.checkpointing import recomputing
from kway.step.normalise import local_statistics, pool, pool_columns

Tensor = torch.Tensor


class ShardStatistics:
    """Collects what each layer saw in each shard of a step. ``shard`` is the one being computed.

    All layers lie in one table, a row a shard: their means, their variances, then a count of values for each layer.
    """

    def __init__(self, found: list[tuple[str, _BatchNorm]], shards: int, device: torch.device) -> None:
        self.layers = [module for _, module in found]
        self.shard = 0
        self._widths = [module.num_features for module in self.layers]
        channels = sum(self._widths)
        self._rows = torch.zeros(shards, 2 * channels + len(found), dtype=torch.float64, device=device)
        means, variances, self._counts = torch.split(self._rows, [channels, channels, len(found)], dim=1)
        self._means, self._variances = means, variances
        self._columns = [torch.split(whole, self._widths, dim=1) for whole in (means, variances)]
        self._layer_of = torch.repeat_interleave(
            torch.arange(len(found), device=device),
            torch.tensor(self._widths, dtype=torch.int64, device=device),
            output_size=channels,
        )
        self._seen: set[tuple[int, int]] = set()

    def clear(self) -> None:
        """Forget the last step."""
        self._rows.zero_()
        self._seen.clear()

    def note(self, place: int, x: Tensor) -> None:
        """Add what layer number ``place`` sees: x of shape (N, C, ...)."""
        mean, var = local_statistics(x)
        here = [columns[place][self.shard] for columns in self._columns]
        count = self._counts[self.shard, place]
        values = x.numel() // x.size(1)
        if (place, self.shard) in self._seen:  # a layer that a forward pass uses twice
            now = torch.cat([mean.double(), var.double(), mean.new_full((1,), values, dtype=torch.float64)])
            both = pool(torch.stack([torch.cat([*here, count.view(1)]), now]))
            here[0].copy_(both.mean)
            here[1].copy_(both.var)
            count.copy_(both.count)
        else:
            self._seen.add((place, self.shard))
            here[0].copy_(mean)
            here[1].copy_(var)
            count.fill_(values)

    @torch.no_grad()
    def finish(self, group: Group) -> None:
        """Update the running statistics from all shards. A collective.

        Every entry is written by one rank and zero on the others: the sum is exact in any order.
        """
        if not self.layers:
            return
        group.sum_(self._rows)
        statistics = pool_columns(self._means, self._variances, self._counts.index_select(1, self._layer_of))
        groups: dict[tuple[float, torch.dtype], list[int]] = {}
        for place in self._used():
            module = self.layers[place]
            factor = count_batch(module)
            if factor is not None and module.running_mean is not None:
                groups.setdefault((factor, module.running_mean.dtype), []).append(place)
        # A vector for all layers instead of kernels for each: a GPU is slow to start small ones.
        unbiased = statistics.var * (statistics.count / (statistics.count - 1))
        for (factor, _), places in groups.items():
            modules = [self.layers[place] for place in places]
            self._move([m.running_mean for m in modules], statistics.mean, places, factor)
            self._move([m.running_var for m in modules], unbiased, places, factor)

    def _used(self) -> list[int]:
        """List the layers that normalised anything in this step, on any rank, and keep running statistics."""
        own = {place for place, _ in self._seen}
        kept = [place for place, module in enumerate(self.layers) if module.track_running_stats]
        if own.issuperset(kept):
            return kept
        counted = self._counts.sum(0).tolist()
        return [place for place in kept if counted[place] > 0]

    def _move(self, running: list[Tensor | None], values: Tensor, places: list[int], factor: float) -> None:
        found = [tensor for tensor in running if tensor is not None]
        parts = torch.split(values, self._widths)
        target = torch.cat([parts[place] for place in places])
        moved = torch.cat(found).double() * (1 - factor) + target * factor
        torch._foreach_copy_(found, list(torch.split(moved.to(found[0].dtype), [len(t) for t in found])))


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
