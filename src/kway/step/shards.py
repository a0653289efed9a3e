"""One optimizer step over fixed micro-shards: the same bits on any number of devices."""

from collections.abc import Callable

import torch
from torch import nn

from kway.comm.flat import FlatGradients
from kway.comm.group import Group
from kway.comm.tree import Span, TreeReducer, halves
from kway.data.loader import Share
from kway.data.order import bounds
from kway.data.seeds import key
from kway.job import Job
from kway.step.batchnorm import Presence
from kway.step.core import Outcome, StepCore, wide
from kway.step.pooled import ShardStatistics
from kway.step.seeds import seed_generators
from kway.step.sparse import sparse_parameters
from kway.step.tally import Tally, measure

Tensor = torch.Tensor


class ShardStep(StepCore):
    """Each of ``shards`` micro-shards of the global batch is computed with the same shapes wherever it runs, under
    random generators seeded by (seed, step, shard); their gradients are summed in one binary tree.

    A share's micro-batches are this rank's shards, in order; an empty shard is a zero.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        presence: Presence,
        group: Group,
        shards: int,
        statistics: ShardStatistics,
    ) -> None:
        super().__init__(job, model, optimizer, device, presence, group, shards)
        self.group, self.shards, self.statistics = group, shards, statistics
        held = [bounds(shards, group.size, rank) for rank in range(group.size)]
        self.first = held[group.rank][0]
        self._tree = TreeReducer(group, shards, held)
        self._flat = self._vectors()

    def run(self, share: Share, step: int, tally: Tally | None = None) -> Outcome:
        """Take optimizer step number ``step`` of the run on a share. Raises what model and loss raise."""
        if self.check_parameters():
            self._flat = self._vectors()
        self.presence.take(share)
        self.statistics.clear()

        def leaf(shard: int) -> list[Tensor]:
            batch, samples = share.micro[shard - self.first]
            return self._shard(batch, samples, shard, share.total, step, tally)

        partials = {span: _summed(span, leaf) for span in self._tree.own}
        for place, vector in enumerate(self._flat.vectors):
            vector.copy_(self._tree.reduce({span: parts[place] for span, parts in partials.items()}))
        self._flat.hand_out()
        self.statistics.finish(self.group)
        losses, weights = self._flat.scalars.clone().view(2, self.shards)
        loss, weight = losses.sum(), weights.sum()
        self._flat.divide_(
            weight / share.total if self.rule.averaged else weight.new_tensor(1.0 / share.total)
        )
        if self.rule.averaged:
            loss = loss / weight
        penalty = self.update()
        return Outcome(loss if penalty is None else loss + penalty, weight, losses)

    def _vectors(self) -> FlatGradients:
        parameters = list(self.model.parameters())
        return FlatGradients(parameters, 2 * self.shards, sparse_parameters(self.model))

    def _shard(
        self, batch: object, samples: int, shard: int, total_samples: int, step: int, tally: Tally | None
    ) -> list[Tensor]:
        """Return the flat gradients of one shard, with its loss and weight in its own slots."""
        self.optimizer.zero_grad(set_to_none=True)
        slots = torch.zeros(2, self.shards, dtype=torch.float64, device=self.device)
        if samples:
            self.statistics.shard = shard
            seed_generators(key(self.job.seed, "step", step, "shard", shard), self.device)
            output, target, total, weight = self.forward(batch, samples)
            objective = total / total_samples
            self.backward(objective)
            slots = slots.to(wide(total))
            slots[0, shard], slots[1, shard] = total.detach(), weight
            if tally is not None:
                measure(self.job.metrics, output, target, samples, tally, shard)
        self._flat.collect(slots.view(-1), counts=samples > 0)
        return [vector.clone() for vector in self._flat.vectors]


def _summed(span: Span, leaf: Callable[[int], list[Tensor]]) -> list[Tensor]:
    """Compute the shards of a node in order, summing as the tree does; holds one vector for each level at most."""
    if span[1] - span[0] == 1:
        return leaf(span[0])
    left, right = halves(span)
    total = _summed(left, leaf)
    torch._foreach_add_(total, _summed(right, leaf))
    return total
