"""One optimizer step over fixed micro-shards: the same bits on any number of devices."""

from collections.abc import Callable

import torch
from torch import nn

from kway.comm.buckets import BucketedTree
from kway.comm.flat import FlatGradients
from kway.comm.group import Group
from kway.comm.tree import Span, TreeReducer, halves
from kway.data.loader import Share
from kway.data.order import bounds
from kway.data.seeds import key
from kway.errors import RefusedError
from kway.job import Job
from kway.step.core import StepCore
from kway.step.gradients import sparse_parameters
from kway.step.kept_buffers import SHARD, KeptBuffers
from kway.step.numbers import CALLS, LOSSES, WEIGHTS, WISHES, length, rows
from kway.step.outcome import Outcome
from kway.step.pooled import ShardStatistics
from kway.step.precision import wide
from kway.step.presence import Presence
from kway.step.seeds import Draws
from kway.step.tally import Tally, measure
from kway.step.telling import EACH_STEP, Telling

Tensor = torch.Tensor

# Of the numbers after the rows, of which the last one is the reducer's.
_BESIDE, _IS_DOUBLE = 2, -2


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
        telling: Telling = EACH_STEP,
    ) -> None:
        super().__init__(job, model, optimizer, device, presence, group, telling, shards)
        self.shards, self.statistics = shards, statistics
        held = [bounds(shards, group.size, rank) for rank in range(group.size)]
        self.first, self._held = held[group.rank][0], held
        self._tree = TreeReducer(group.apart(), shards, held)
        self._lay_out()
        # Last: what it begins to listen to has to be closed.
        self.kept: KeptBuffers = KeptBuffers(model, [*statistics.layers], SHARD, self.attribute_doubts)

    def prepare(self, share: Share) -> bool:
        """Do what a step needs of the host before anything is computed: see ``StepCore.prepare``."""
        changed = super().prepare(share)
        if changed:
            self._lay_out()
        return changed

    def seeds(self, share: Share, step: int) -> list[int]:
        """Return one key for each shard of this rank."""
        shards = range(self.first, self.first + len(share.micro))
        return [key(self.job.seed, "step", step, "shard", shard) for shard in shards]

    def gradients(self, share: Share, draws: Draws, tally: Tally | None = None) -> Outcome:
        """Leave the gradient of the global batch on the parameters: see ``StepCore.gradients``."""
        self.presence.take(share)
        self._doubles = False
        self.statistics.clear()
        self.kept.begin(self.modules)
        if self.agrees and not share.count:
            self.agree(None, 0)

        def leaf(shard: int) -> list[Tensor]:
            scalars, counts = self._shard(shard, share, draws, tally)
            self._flat.collect(scalars, counts)
            return [vector.clone() for vector in self._flat.vectors]

        # All but the last shard of this rank first: while that one is computed, its gradients are summed already.
        *others, last = self._tree.own
        partials = {span: _summed(span, leaf) for span in others}
        spine: list[list[Tensor]] = []
        start, stop = last
        while stop - start > 1:
            left, (start, stop) = halves((start, stop))
            spine.append(_summed(left, leaf))
        with self._buckets.during_backward(partials, spine):
            scalars, counts = self._shard(start, share, draws, tally)
        # Shards are as many as ranks, or more: what ranks say has room in their rows.
        own_rows = rows(scalars, self.shards)[:, self.group.rank]
        own = self.signs.write(own_rows[CALLS], own_rows[WISHES])
        complete = self._buckets.finish(scalars, counts)
        self._flat.hand_out(complete)
        self.statistics.finish(self.group)
        self.kept.end_of_step(self.group, idle=self._some_idle(share.total))
        # In the dtype of one device's loss, which a rank without samples has to read from the others.
        numbers = self._flat.scalars
        doubles = self._doubles if share.count else bool(numbers[_IS_DOUBLE] > 0)
        numbers = numbers.to(torch.float64 if doubles else torch.float32)
        # 0, or NaN where a gradient came too late: then all of the step is NaN, and never another number.
        late = numbers[-1]
        losses, weights, calls, asked = rows(numbers, self.shards)
        told = None if own is None else calls[: self.group.size]
        asked = asked[: self.group.size]
        if self.group.size > 1 and told is not None and own is not None:
            late = late + self.mispaired(told, own)
        loss, weight = losses.sum() + late, weights.sum() + late
        # As in ShareStep: of a weight of 0 gradients stay the 0 they are.
        nominal = self.nominal(share.total)
        mean = (weight / nominal).masked_fill(weight == 0, 1.0)
        self._flat.divide_(mean if self.rule.averaged else late + 1.0 / nominal)
        if self.rule.averaged:
            loss = loss / weight
        return Outcome(loss, weight, losses, asked, told)

    def forget(self) -> None:
        """Take the buffers' values anew with the next step: their versions do not tell of a replay."""
        self.kept.forget()

    def kept_over(self, share: Share) -> KeptBuffers:
        """Return what keeps buffers over shards, also where a rank holds one: see ``StepCore.kept_over``."""
        return self.kept

    def _some_idle(self, total: int) -> bool:
        """Whether a rank has no shard with a sample. Those without come last."""
        return any(start >= total for start, _ in self._held)

    def _lay_out(self) -> None:
        # Not the frozen ones: they would be cloned and travel as zeros.
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._trained = parameters
        self._frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        tables = sparse_parameters(self.model)
        self._flat = FlatGradients(parameters, length(self.shards, _BESIDE), tables, beside=self._frozen)
        self._buckets = BucketedTree(self._flat, self._tree)

    def _check_frozen(self) -> None:
        """Raise ``RefusedError`` for a gradient that nobody laid out a place for, and for one that ends on the way."""
        late = next((parameter for parameter in self._frozen if parameter.grad is not None), None)
        what = "was frozen before the step has a gradient after it"
        if late is None:
            late = next((parameter for parameter in self._trained if not parameter.requires_grad), None)
            what = "was trained before the step is frozen after it"
        if late is not None:
            raise RefusedError(
                f"a parameter of shape {tuple(late.shape)} that {what}",
                "at exactness bits parameters are frozen and unfrozen between steps",
                "set requires_grad outside of the model's forward",
            )

    def _shard(self, shard: int, share: Share, draws: Draws, tally: Tally | None) -> tuple[Tensor, bool]:
        """Compute one shard's gradients. Return numbers, and whether it has samples.

        The numbers are laid out as in ``step.numbers``: its loss and weight in its own place, whether they are
        float64, and a 0.
        """
        batch, samples = share.micro[shard - self.first]
        self.clear_gradients()
        slots = None
        if samples:
            self.statistics.shard = shard
            draws.at(shard - self.first)
            output, target, total, weight = self.forward(batch, samples)
            if self.agrees:
                self.agree(weight, samples)
            self.backward(total / self.nominal(share.total), output)
            self._check_frozen()
            self.kept.end_of_piece()
            slots = torch.zeros(length(self.shards, _BESIDE), dtype=wide(total.dtype), device=self.device)
            places = rows(slots, self.shards)
            places[LOSSES, shard], places[WEIGHTS, shard] = total.detach(), weight
            if slots.dtype == torch.float64:
                self._doubles = True
                slots[_IS_DOUBLE].fill_(1.0)
            if tally is not None:
                measure(self.job.metrics, output, target, samples, tally, shard, self.right)
        if slots is None:
            slots = torch.zeros(length(self.shards, _BESIDE), device=self.device)
        return slots, samples > 0


def _summed(span: Span, leaf: Callable[[int], list[Tensor]]) -> list[Tensor]:
    """Compute the shards of a node in order, summing as the tree does; holds one vector for each level at most."""
    if span[1] - span[0] == 1:
        return leaf(span[0])
    left, right = halves(span)
    total = _summed(left, leaf)
    torch._foreach_add_(total, _summed(right, leaf))
    return total
