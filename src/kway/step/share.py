"""One optimizer step over this rank's share of the global batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kway.data.loader import Share
from kway.data.seeds import key
from kway.errors import UsageError
from kway.job import Job, clip_rule
from kway.step.batchnorm import Presence
from kway.step.inputs import move, splitter
from kway.step.losses import rule_for
from kway.step.precision import precision_of
from kway.step.seeds import seed_generators
from kway.step.tally import Tally, measure

Tensor = torch.Tensor
# Sums gradients over the ranks, with a vector of scalars; then divides all gradients by a scalar.
Reduce = Callable[[Tensor, bool], Tensor]
Divide = Callable[[Tensor], None]


@dataclass(frozen=True)
class Outcome:
    """What a step gave. ``loss``: the loss of the global batch (scalar tensor on the device); ``weight``: the
    sum of its weights; ``losses``: each rank's own sum, shape (ranks,), to say which rank broke.
    """

    loss: Tensor
    weight: Tensor
    losses: Tensor


class ShareStep:
    """The arithmetic of a step: forward and backward over micro-batches, reduction, clipping, optimizer.

    ``place``: this rank's place among ``ranks`` shares. ``reduce`` and ``divide``: as of a
    ``GradientReducer``, or ``None`` where one device holds the whole batch.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        presence: Presence,
        place: int = 0,
        ranks: int = 1,
        reduce: Reduce | None = None,
        divide: Divide | None = None,
    ) -> None:
        self.job, self.model, self.optimizer, self.device = job, model, optimizer, device
        self.presence, self.place, self.ranks = presence, place, ranks
        self._reduce, self._divide = reduce, divide
        self.precision = precision_of(job.precision)
        self.rule = rule_for(job.loss, device, self.precision.floating)
        self.split = splitter(job.inputs, job.target, job.loss is not None)
        self.scaler = self.precision.scaler(device)
        self.schedule = job.schedule(optimizer) if job.schedule is not None else None
        self.clip = clip_rule(job.clip)
        self._known: list[nn.Parameter] = list(model.parameters())

    def output(self, batch: Any) -> Any:
        """Run the model alone on one collated batch."""
        with self.precision.compute(self.device):
            args, kwargs, _ = self.split(move(batch, self.device, self.precision.floating))
            return self.model(*args, **kwargs)

    def forward(self, batch: Any, samples: int) -> tuple[Any, Any, Tensor, Tensor]:
        """Run model and loss on one collated batch: (output, target, total, weight)."""
        with self.precision.compute(self.device):
            args, kwargs, target = self.split(move(batch, self.device, self.precision.floating))
            output = self.model(*args, **kwargs)
            total, weight = self.rule(output, target, samples)
        return output, target, total, weight

    def run(self, share: Share, step: int, tally: Tally | None = None) -> Outcome:
        """Take optimizer step number ``step`` of the run on a share. Raises what model and loss raise."""
        self._check_parameters()
        seed_generators(key(self.job.seed, "step", step, self.place), self.device)
        self.optimizer.zero_grad(set_to_none=True)
        slots = self._accumulate(share, tally)
        if self._reduce is not None:
            slots = self._reduce(slots, share.count > 0)
        losses, weights = slots.view(2, self.ranks)
        loss, weight = losses.sum(), weights.sum()
        if self.rule.averaged:
            loss = loss / weight
        # A device alone with one micro-batch divided before backward: nothing is left to divide by.
        if not self._whole(share):
            self._rescale(
                weight / share.total if self.rule.averaged else weight.new_tensor(1.0 / share.total)
            )
        penalty = self._update()
        return Outcome(loss if penalty is None else loss + penalty, weight, losses)

    def _check_parameters(self) -> None:
        """Refuse a parameter that came after the optimizer was made and that the optimizer does not know.

        It would get a gradient and stay as it is: easy to overlook. Raises ``UsageError``.
        """
        now = list(self.model.parameters())
        if len(now) == len(self._known) and all(a is b for a, b in zip(now, self._known, strict=True)):
            return
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise UsageError(
                    f"parameter {name!r} was replaced or added after the optimizer was made",
                    "every trained parameter must be in the optimizer",
                    "change the values in place (no_grad, copy_), or hand it over with add_param_group",
                )
        self._known = now

    def _whole(self, share: Share) -> bool:
        return self._reduce is None and len(share.micro) == 1

    def _accumulate(self, share: Share, tally: Tally | None) -> Tensor:
        """Run forward and backward over the micro-batches; return losses and weights, this rank's in its slot."""
        slots: Tensor | None = None
        self.presence.counts = share.count > 0
        for batch, samples in share.micro:
            if share.count and not samples:
                continue
            output, target, total, weight = self.forward(batch, samples)
            if self._whole(share):
                objective = total / weight if self.rule.averaged else total
            else:
                # The scale keeps gradients at their usual magnitude; it is undone once they are reduced.
                objective = total * ((1.0 if samples else 0.0) / share.total)
            if objective.requires_grad:
                (self.scaler.scale(objective) if self.scaler else objective).backward()  # type: ignore[no-untyped-call]
            if slots is None:
                slots = torch.zeros(2, self.ranks, dtype=_wide(total), device=total.device)
            if samples:
                slots[0, self.place] += total.detach()
                slots[1, self.place] += weight
                if tally is not None:
                    measure(self.job.metrics, output, target, samples, tally)
        assert slots is not None
        return slots.view(-1)

    def _rescale(self, divisor: Tensor) -> None:
        if self._divide is not None:
            self._divide(divisor)
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_div_(grads, divisor.to(grads[0].dtype)) if grads else None

    def _update(self) -> Tensor | None:
        """Add the penalty once, clip what was reduced, step optimizer and schedule. Return the penalty."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        penalty = None
        if self.job.penalty is not None:
            value = self.job.penalty(self.model)
            value.backward()
            penalty = value.detach()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.clip is not None and parameters:
            kind, limit = self.clip
            if kind == "norm":
                nn.utils.clip_grad_norm_(parameters, limit)
            else:
                nn.utils.clip_grad_value_(parameters, limit)
        stepped = True
        if self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            stepped = self.scaler.get_scale() >= before
        if self.schedule is not None and stepped and not _waits_for_metric(self.schedule):
            self.schedule.step()
        return penalty


def _wide(total: Tensor) -> torch.dtype:
    return torch.promote_types(total.dtype, torch.float32)


def _waits_for_metric(schedule: Any) -> bool:
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
