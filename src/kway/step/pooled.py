"""Batch normalisation for fixed micro-shards: each normalises by itself, and a step updates the running
statistics once, from the statistics of all shards, weighted by their counts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from kway.comm.group import Group
from kway.step.arithmetic import pooled
from kway.step.batchnorm import replaceable_layers
from kway.step.checkpointing import recomputing
from kway.step.normalise import local_statistics
from kway.step.presence import Presence
from kway.step.running import move_together, weight_of_batch, width_of
from kway.step.stand_in import standing_in

Tensor = torch.Tensor


class _Seen:
    """What the layers saw in one shard: views into one vector of all means and all unbiased variances.

    torch's kernel writes there what it computes anyway, as running statistics that move the whole way.
    """

    def __init__(self, widths: list[int], dtype: torch.dtype, device: torch.device) -> None:
        channels = sum(widths)
        self.dtype = dtype
        self.vector = torch.zeros(2 * channels, dtype=dtype, device=device)
        means, variances = torch.split(self.vector, channels)
        self.means, self.variances = torch.split(means, widths), torch.split(variances, widths)
        self.counts = [0] * len(widths)

    def clear(self) -> None:
        self.vector.zero_()
        self.counts = [0] * len(self.counts)

    def add(self, place: int, x: Tensor) -> None:
        """Add statistics of x by hand: a layer that saw another x before, or that has a dtype of its own."""
        channels, before = x.size(1), self.counts[place]
        mean, var = local_statistics(x)
        now = torch.cat([mean.double(), var.double(), mean.new_full((1,), x.numel() // channels).double()])
        biased = self.variances[place].double() * ((before - 1) / max(before, 1))
        seen = torch.cat([self.means[place].double(), biased, now.new_full((1,), before)])
        both_mean, both_var, count = pooled(torch.stack([seen, now]))
        self.counts[place] += x.numel() // channels
        # Past autograd, which holds them for the layer's backward pass without reading them in training.
        self.means[place].data.copy_(both_mean)
        self.variances[place].data.copy_(both_var * (count / (count - 1)))


class ShardStatistics:
    """Collects what each layer saw in each shard of a step. ``shard`` is the one being computed."""

    def __init__(self, found: list[tuple[str, _BatchNorm]], shards: int, device: torch.device) -> None:
        self.layers = [module for _, module in found]
        self.shard, self._device = 0, device
        # Not num_features: torch does not look at it, and who prunes channels by hand may leave it as it was.
        self._widths = [width_of(module) or 0 for module in self.layers]
        channels = sum(self._widths)
        held = [t for module in self.layers for t in (module.weight, module.running_mean) if t is not None]
        self._dtype = torch.float64 if any(t.dtype == torch.float64 for t in held) else torch.float32
        self._seen: dict[int, _Seen] = {}
        # A row a shard: all means, all unbiased variances, then a count of values for each layer.
        self._rows = torch.zeros(shards, 2 * channels + len(found), dtype=torch.float64, device=device)
        self._means, self._variances, self._counts = torch.split(
            self._rows, [channels, channels, len(found)], dim=1
        )
        self._tables: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        self._layer_of = torch.repeat_interleave(
            torch.arange(len(found), device=device),
            torch.tensor(self._widths, dtype=torch.int64, device=device),
            output_size=channels,
        )

    def clear(self) -> None:
        """Forget the last step."""
        for seen in self._seen.values():
            seen.clear()

    def normalise(self, place: int, x: Tensor) -> Tensor:
        """Normalise x, shape (N, C, ...), by its own statistics, as layer ``place`` does, and note them."""
        module = self.layers[place]
        if not self._widths[place] or not x.numel():
            # Nothing to note: there are no statistics to move, or no samples.
            return nn.functional.batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)
        seen = self._seen.get(self.shard)
        if seen is None:
            seen = self._seen[self.shard] = _Seen(self._widths, self._dtype, self._device)
        alike = x.dtype == seen.dtype or (seen.dtype == torch.float32 and x.dtype != torch.float64)
        suits = alike and (module.weight is None or module.weight.dtype == seen.dtype)
        mean, var = (seen.means[place], seen.variances[place]) if suits else (None, None)
        first = suits and seen.counts[place] == 0 and not recomputing()
        if first:
            seen.counts[place] = x.numel() // x.size(1)
        elif not recomputing():
            seen.add(place, x)
        # They come along where they must not move, too: a recomputation has to save the same tensors.
        factor = 1.0 if first else 0.0
        return nn.functional.batch_norm(x, mean, var, module.weight, module.bias, True, factor, module.eps)

    @torch.no_grad()
    def finish(self, group: Group) -> None:
        """Update the running statistics from all shards. A collective.

        Every entry is written by one rank and zero on the others: the sum is exact in any order.
        """
        if not self.layers:
            return
        self._fill()
        group.sum_(self._rows)
        counts = self._counts.index_select(1, self._layer_of)
        total = counts.sum(0)
        mean = (self._means * counts).sum(0) / total
        within = self._variances * (counts - 1).clamp_min_(0)
        unbiased = torch.addcmul(within, (self._means - mean).square_(), counts).sum(0) / (total - 1)
        used = self._used()
        # One kernel for all layers instead of one for each: a GPU is slow to start small ones.
        counters = [self.layers[place].num_batches_tracked for place in used]
        if counted := [counter for counter in counters if counter is not None]:
            torch._foreach_add_(counted, 1)
        groups: dict[tuple[float, torch.dtype], list[int]] = {}
        for place in used:
            module = self.layers[place]
            factor = weight_of_batch(module)
            if factor is not None and module.running_mean is not None:
                groups.setdefault((factor, module.running_mean.dtype), []).append(place)
        values = [*torch.split(mean, self._widths), *torch.split(unbiased, self._widths)]
        for (factor, _), places in groups.items():
            modules = [self.layers[place] for place in places]
            running = [*(m.running_mean for m in modules), *(m.running_var for m in modules)]
            moved = [values[p + half] for half in (0, len(self.layers)) for p in places]
            move_together([r for r in running if r is not None], torch.cat(moved), factor)

    def _fill(self) -> None:
        """Write this rank's shards into their rows, and zeros into the others."""
        counts = tuple((shard, *seen.counts) for shard, seen in self._seen.items())
        table = self._tables.get(counts)
        if table is None:
            table = self._table(counts)
            # Kept for good, and a few hundred bytes each: a recorded step reads the one of its form.
            self._tables[counts] = table
        self._rows.zero_()
        self._counts.copy_(table)
        for shard, seen in self._seen.items():
            self._rows[shard, : len(seen.vector)].copy_(seen.vector)

    def _table(self, counts: tuple[tuple[int, ...], ...]) -> Tensor:
        """Make a table of counts on the device, for which nothing waits. Once for each form of a batch."""
        # No part of what makes two steps alike: see ``attributes``.
        with _disable_current_modes():
            table = torch.zeros(self._counts.shape, dtype=torch.float64, device=self._device)
            for shard, *row in counts:
                for place, count in enumerate(row):
                    table[shard, place].fill_(count)
        return table

    def _used(self) -> list[int]:
        """List the layers that normalised anything in this step, on any rank, and keep running statistics."""
        own = {place for seen in self._seen.values() for place, count in enumerate(seen.counts) if count}
        kept = [place for place, module in enumerate(self.layers) if module.track_running_stats]
        if own.issuperset(kept):
            return kept
        counted = self._counts.sum(0).tolist()
        return [place for place in kept if counted[place] > 0]


@contextmanager
def per_shard(
    model: nn.Module, shards: int, device: torch.device, presence: Presence
) -> Iterator[ShardStatistics]:
    """While open, training passes of ``model`` note batch statistics by shard and leave the running ones alone."""
    found = replaceable_layers(model)
    statistics = ShardStatistics(found, shards, device)

    def forward_of(place: int, module: _BatchNorm) -> Callable[[Tensor], Tensor]:
        plain = type(module).forward

        def forward(x: Tensor) -> Tensor:
            # What is no part of a shard counts as it is, on every rank alike.
            if not module.training or presence.apart:
                return plain(module, x)
            module._check_input_dim(x)  # type: ignore[no-untyped-call]
            if x.numel() == x.size(1):
                raise ValueError(
                    f"batch normalisation needs more than 1 value a channel to train, and shard "
                    f"{statistics.shard} has 1 (input {tuple(x.shape)}): use fewer shards or a larger batch; where "
                    "it is the last batch of an epoch that is too small, one that leaves a larger rest or none, or a "
                    "DataLoader with drop_last=True"
                )
            return statistics.normalise(place, x)

        return forward

    forwards = [(module, forward_of(place, module)) for place, (_, module) in enumerate(found)]
    with standing_in(forwards, presence):
        yield statistics
