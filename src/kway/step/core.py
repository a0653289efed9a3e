"""What every kind of step shares: model, loss, precision, optimizer, schedule."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kway.comm.group import Group
from kway.data.loader import Share
from kway.data.seeds import key
from kway.errors import UsageError
from kway.job import Job, clip_rule
from kway.launch.parameter_hooks import any_hooked
from kway.step.build import make_schedule
from kway.step.clip import clip_gradients
from kway.step.ema import MovingAverage
from kway.step.endings import Ending, as_they_are
from kway.step.gather import WholeBatch
from kway.step.gradients import keep_apart, resolve_conjugates
from kway.step.hooked import refuse_hooks
from kway.step.inputs import caller, move, splitter
from kway.step.kept_buffers import KeptBuffers
from kway.step.losses import rule_for
from kway.step.made import made_since, names_of
from kway.step.mispaired import check_calls
from kway.step.numbers import unlike
from kway.step.outcome import Outcome
from kway.step.penalty import add_gradients, one_number
from kway.step.precision import overflowed, precision_of
from kway.step.presence import Presence
from kway.step.roster import Roster
from kway.step.scaling import advance
from kway.step.seeds import UPDATE, Draws, Keyed, has_drawn
from kway.step.signs import Signs
from kway.step.tally import Tally, right_ones
from kway.step.telling import Telling

Tensor = torch.Tensor


class StepCore(ABC):
    """Forward passes and the update; a subclass says how a batch becomes gradients.

    ``kept``: what keeps buffers and attributes the same over the pieces of a batch, if anything does.
    ``attribute_doubts``: its lines for the user about attributes. Those about the loss are ``rule.doubts``.
    """

    kept: KeptBuffers | None

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        presence: Presence,
        group: Group,
        telling: Telling,
        shards: int = 1,
    ) -> None:
        self.job, self.model, self.optimizer, self.device = job, model, optimizer, device
        self.presence, self.whole_batch = presence, WholeBatch(group, presence, shards)
        self.precision = precision_of(job.precision)
        self.rule = rule_for(job.loss, device, self.precision.floating, model)
        self.split = splitter(job.inputs, job.target, job.loss is not None)
        self._call = caller(job.inputs, job.target, job.loss is not None)
        self.scaler = self.precision.scaler(device)
        self.schedule = make_schedule(job, optimizer)
        self.clip = clip_rule(job.clip)
        self.average = MovingAverage(model, job.ema) if job.ema is not None else None
        # A small whole number that this rank tells all others with the gradients of the next step.
        self.asked = 0
        # Whether computing the gradients of the first step drew random numbers.
        self.drew: bool | None = None
        self.group, self.signs = group, Signs(group, telling)
        # What numbers are drawn from, given the keys of a step's places.
        self.draws: Callable[[Sequence[int], torch.device], Draws] = Keyed
        self.attribute_doubts: list[str] = []
        self._stepped, self._other_loss = True, False
        # Of steps whose gradients are scaled: how many there were, and how many of them overflowed.
        self._scaled, self._overflowed = 0, 0
        self.right: Callable[[Tensor, Tensor], Tensor] = right_ones
        # What a sample weighs in the loss, about: see ``agree``. ``None`` before the first batch that is cut.
        self.per_sample: float | None = None
        # How a batch is cut, and the level at which no hook may act on the gradient of a part; ``None``: any may.
        self.cut: tuple[str, str] | None = None
        # Whether what ``compilable`` lists is compiled in the step being taken.
        self.compiles = False
        self._roster, self._built = Roster(model), names_of(model)
        # Held, so that no layer made later has the identity of one of them.
        self._known = {id(module): module for module in self._roster.modules}

    def run(self, share: Share, step: int, tally: Tally | None = None) -> Outcome:
        """Take optimizer step number ``step`` of the run on a share. Raises what model and loss raise."""
        self.prepare(share)
        draws = self.draws(self.keys(share, step), self.device)
        outcome = self.gradients(share, draws, tally)
        self.begin_update(draws)
        penalty = self.update()
        self.advance()
        return outcome if penalty is None else outcome.plus(penalty)

    def compilable(self) -> list[tuple[Any, str, bool]]:
        """List the functions of tensors alone that a compiled step may run as single kernels.

        (Object, attribute, whether one code is to do for all shapes): layers have many widths, a loss has few shapes.
        """
        arithmetic = self.presence.arithmetic
        return [
            (self.rule, "summed", False),
            (self, "right", False),
            *((arithmetic, name, True) for name in arithmetic.names()),
        ]

    def prepare(self, share: Share) -> bool:
        """Do what a step needs of the host before anything is computed.

        Return whether the model has other parameters than at the last step, or the loss was changed. Raises
        ``UsageError`` and ``RefusedError``.
        """
        self.signs.begin(self.asked)
        self.follow_loss()
        changed, self._other_loss = self._other_loss, False
        changed |= self.check_parameters()
        if self.cut is not None and any_hooked(self.parameters):
            # One may be new, or on what was frozen when the run began.
            refuse_hooks(self.model, *self.cut)
        return changed

    def follow_loss(self) -> None:
        """Take over what a loop has changed in a loss module."""
        self._other_loss |= self.rule.changed()

    def keys(self, share: Share, step: int) -> list[int]:
        """List the keys from which this rank draws in a step: those of ``seeds``, and last that of ``UPDATE``.

        What penalty and optimizer draw is drawn by all ranks, for weights of which each holds a copy.
        """
        return [*self.seeds(share, step), key(self.job.seed, "update", step)]

    def begin_update(self, draws: Draws) -> None:
        """Draw from now on what all ranks draw alike. Before that, in the first step, see whether this one drew."""
        if self.drew is None:
            self.drew = has_drawn(self.device)
        draws.at(UPDATE)

    @abstractmethod
    def seeds(self, share: Share, step: int) -> list[int]:
        """List the keys from which this rank computes gradients in optimizer step number ``step``, in order."""

    @abstractmethod
    def gradients(self, share: Share, draws: Draws, tally: Tally | None = None) -> Outcome:
        """Leave the gradient of the global batch on the parameters of every rank; a penalty is not in it.

        ``draws``: at one place for each of ``seeds``. What is computed depends on shapes and on tensors only, so
        that a device can be told to do the same again.
        """

    def forget(self) -> None:  # noqa: B027
        """Forget what was noted of tensors whose numbers have changed since without a note: see ``step.graph``."""

    @abstractmethod
    def kept_over(self, share: Share) -> KeptBuffers | None:
        """Return what keeps buffers and attributes alike over the pieces of a share, ``None`` where nothing has to."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the model had when this step began, by its names: what the optimizer was made of."""
        return self._roster.parameters

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the model had when this step began."""
        return self._roster.modules

    def made(self, state: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Return what the model has made since it was built: see ``kway.step.made``."""
        return made_since(self._built, self.model, state)

    def output(self, batch: Any) -> Any:
        """Run the model alone on one collated batch, which need not hold a target."""
        with self.precision.compute(self.device), self.whole_batch.current():
            args, kwargs = self._call(move(batch, self.device, self.precision.floating))
            return self.model(*args, **kwargs)

    def forward(
        self, batch: Any, samples: int, ending: Ending = as_they_are, factor: float = 1.0
    ) -> tuple[Any, Any, Tensor, Tensor]:
        """Run model and loss on one collated batch: (output, target, total, weight).

        The last two are as ``ending`` makes them of these.
        """
        with self.precision.compute(self.device), self.whole_batch.current():
            args, kwargs, target = self.split(move(batch, self.device, self.precision.floating))
            output = self.model(*args, **kwargs)
            ended = self.rule(output, target, samples, ending, factor)
        self.rule.check_moved(self.whole_batch.is_cut)
        return output, target, *ended

    def nominal(self, total: int) -> float:
        """Return what the loss of a batch of ``total`` samples, which is cut, is divided by before backward.

        The same on all ranks, and about its weight: what acts on gradients inside of backward sees them as large as on
        one device. 1 where the loss is a sum.
        """
        return total * (self.per_sample or 1.0) if self.rule.averaged else 1.0

    def agree(self, weight: Tensor | None, samples: int) -> None:
        """Let the first share with samples say what a sample weighs from now on. A collective, in the first step whose
        batch is cut, which waits for the device.

        ``weight``: of the first so many ``samples`` that this rank computes, ``None`` where it has none. Where all of
        them weigh nothing, the next share is asked. 1 at least: a first share of little weight would let the gradients
        of all others leave the range of their dtype.
        """
        # A sum with a place for each rank, and no gather: one of those that layers call may be what another rank is at.
        slots = torch.zeros(self.group.size, dtype=torch.float64, device=self.device)
        if weight is not None and samples:
            slots[self.group.rank] = weight / samples
        found = self.group.sum_(slots).tolist()
        self.per_sample = max(1.0, next((each for each in found if 0 < each < math.inf), 1.0))

    @property
    def agrees(self) -> bool:
        """Whether ``agree`` is to be called in a step whose batch is cut."""
        return self.per_sample is None and self.rule.averaged

    def clear_gradients(self) -> None:
        """Leave no gradient of an earlier step: on the model's parameters, and on what the optimizer holds beside them.

        An optimizer may hold only some of the model's parameters. Its own ``zero_grad`` would leave the others'
        gradients to be added up and reduced again, and they count in what is clipped.
        """
        for parameter in self.parameters:
            parameter.grad = None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def backward(self, objective: Tensor, output: Any) -> None:
        """Add the gradients of a scalar, if it has any. Parts of the model may be computed again.

        ``output``: what the model returned. Backward may communicate, so that a rank takes part in it also with
        what its scalar does not reach: see ``Meeting``.
        """
        if not objective.requires_grad:
            with self.whole_batch.current():
                self.presence.meeting.attend(self.model, output)
            return
        scaled: Tensor = self.scaler.scale(objective) if self.scaler else objective
        self.whole_batch.follow(scaled)
        with self.whole_batch.current():
            self.presence.meeting.backward(self.model, scaled, output)

    def mispaired(self, calls: Tensor, own: int) -> Tensor:
        """Return 0 where all ranks called the same collectives, else NaN. ``own``: this rank's fingerprint.

        Added to the weight of a step it makes all of it NaN, never other numbers, and no device is waited for. On a
        CPU raises ``MispairedError`` at once.
        """
        if not self.signs.telling.compared:
            return calls.new_zeros(())
        if calls.is_cuda:
            return unlike(calls)
        check_calls(calls, own)
        return calls.new_zeros(())

    def compare(self, again: bool = False) -> None:
        """Raise ``MispairedError`` where ranks took other steps than the rest that no step has told of yet.

        A collective, but where every step tells; until then the numbers of steps that do not tell are not to be relied
        on. ``again``: also where the last step has told, but nobody has read it.
        """
        own = self.signs.untold(again) if self.group.size > 1 else None
        if own is not None:
            check_calls(self.group.stack(torch.tensor(own, dtype=torch.int64, device=self.device)))

    def check_parameters(self) -> bool:
        """Return whether the model has other parameters than at the last step, or trains others of them.

        Refuse a parameter that is trained now and that the optimizer does not know: it would get a gradient and
        stay as it is, which is easy to overlook. Refuse a layer with state of its own that was not there when the
        run began: what kway does for such layers is not done for it. Raises ``UsageError``.
        """
        if self._roster.stands():
            return False
        now = Roster(self.model)
        for name, module in self.model.named_modules():
            if next(module.buffers(recurse=False), None) is not None and id(module) not in self._known:
                raise UsageError(
                    f"layer {name!r} ({type(module).__name__}) was replaced or added after the run began",
                    "a layer with buffers is prepared when the run begins",
                    "make it with the model, or train on in a new run (init=)",
                )
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise UsageError(
                    f"parameter {name!r} was replaced, added or unfrozen after the optimizer was made, which does "
                    "not hold it",
                    "every trained parameter must be in the optimizer",
                    "change the values in place (no_grad, copy_), give the optimizer all parameters from the "
                    "beginning, or hand it over with add_param_group",
                )
        before, self._roster = self._roster, now
        same = now.has_parameters_of(before)
        if not same:
            # A rank that ran no forward pass, for want of samples, may have missed what changed there.
            self.group.trace.note("other parameters")
        return not same

    def update(self) -> Tensor | None:
        """Add the penalty once, clip what was reduced, step optimizer and average. Return the penalty.

        What overflowed is no step: schedule and average stay where they are with the optimizer.
        """
        scaler = self.scaler
        self._scaled += scaler is not None
        # Without a gradient (a constant loss) there is nothing that could have overflowed.
        groups = self.optimizer.param_groups
        if scaler is not None and all(p.grad is None for group in groups for p in group["params"]):
            scaler = None
        if scaler is not None:
            scaler.unscale_(self.optimizer)
            # It knows the optimizer's parameters alone; those beside them count in what is clipped.
            held = {id(parameter) for group in groups for parameter in group["params"]}
            beside = [p.grad for p in self.parameters if p.grad is not None and id(p) not in held]
            torch._foreach_div_(beside, scaler.get_scale()) if beside else None
        penalty = None
        if self.job.penalty is not None:
            with self.presence.alike():
                value = one_number(self.job.penalty(self.model))
            if value.requires_grad:
                add_gradients(value)
                keep_apart(self.parameters)
            penalty = value.detach()
        parameters = [p for p in self.parameters if p.grad is not None]
        resolve_conjugates(parameters)
        if self.clip is not None and parameters:
            clip_gradients(parameters, *self.clip)
        self._stepped = True
        if scaler is None:
            self.optimizer.step()
        else:
            before = scaler.get_scale()
            scaler.step(self.optimizer)
            scaler.update()
            self._stepped = scaler.get_scale() >= before
            self._overflowed += not self._stepped
        if self._stepped and self.average is not None:
            self.average.update()
        return penalty

    @property
    def left_out(self) -> list[str]:
        """A line for the user where steps so far were none, since their gradients overflowed."""
        has_schedule = self.schedule is not None
        return [overflowed(self._overflowed, self._scaled, has_schedule)] if self._overflowed else []

    def advance(self) -> None:
        """Let the schedule count the step that ``update`` took, if it took one."""
        if self._stepped and self.schedule is not None:
            advance(self.schedule)
