"""The whole step recorded once for each form of a share, and then done again with one call.

Forward, backward, reduction, clipping, optimizer, moving average and metrics become one piece of the device's work.
The host only fills in what changes: inputs, keys of random numbers, learning rates, what ranks tell each other.
"""

from collections.abc import Hashable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from kway.data.loader import Share
from kway.errors import UsageError
from kway.step.attributes import Attributes, HostState
from kway.step.core import StepCore
from kway.step.fixed import FixedInputs, UnsuitedError, form_of
from kway.step.observe import NoLog, OperationLog, Watched, waits
from kway.step.outcome import Outcome
from kway.step.rates import Options, Rates, changed
from kway.step.reads import why_read
from kway.step.recorder import CudaRecorder, Recorder, Recording
from kway.step.seeds import Draws, Keyed
from kway.step.tally import Tally

Tensor = torch.Tensor
# Steps that are taken as they are: what happens once happens there (memory, algorithms, the optimizer's state).
WARM_UP = 2
# Forms that are recorded. More of them mean that a batch has another form almost every time.
MOST_FORMS = 8
# Recordings that a change between steps has made void after fewer replays than this in a row have not paid.
_FEW_REPLAYS, _MOST_IN_VAIN = 32, 8
TOO_SHORT = (
    "no step was recorded: the first ones of a run, and of each form of a batch, are taken one operation after "
    "another, and too few came after them"
)


@dataclass
class _Seen:
    """What a first step of a form showed. ``places``: how many places it draws at."""

    inputs: FixedInputs
    log: Any
    places: int


@dataclass
class _Recorded:
    """A recorded step. ``held``: what it reads and did not make, so that it must stay.

    ``draws``: whether it draws random numbers; ``own``, ``left``: the fingerprint of its collectives, and what of them
    the next step's will tell.
    """

    inputs: FixedInputs
    tally: Tally | None
    draws: bool
    own: int = 0
    left: int = 0
    recording: Recording | None = None
    outcome: Outcome | None = None
    packed: Tensor | None = None
    grads: list[tuple[Any, Tensor | None]] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)


class GraphedStep:
    """Takes the steps of ``core``: the first ones as they are, then by recordings, one for each form of a share.

    What cannot be recorded is found in the first steps and said in ``notices``; those steps are taken as they are,
    with the same arithmetic. Where only the optimizer cannot be recorded, it follows outside of the recording.
    ``traced``: whether operations can be listed, to see that a form's steps are alike; not those of compiled code.
    Raises ``UsageError`` where not every step tells what ranks called: a recorded one tells it always or never.
    """

    def __init__(self, core: StepCore, recorder: Recorder | None = None, traced: bool = True) -> None:
        if not core.signs.telling.each:
            raise UsageError(
                f"recorded steps of which one in {core.signs.telling.every} tells which collectives ranks called",
                "what a recorded step tells, it tells each time it is done again",
                "let every step tell it",
            )
        self.core = core
        self.kind = "graph"
        self.notices: list[str] = []
        self._recorder: Recorder = CudaRecorder(core.device) if recorder is None else recorder
        self._traced = traced
        self._elsewhere = core.device.type != "cpu"
        self._rates = Rates(core.optimizer, core.model)
        self._outside = self._rates.outside
        if core.scaler is not None:
            self._outside = "the gradient scaler reads back whether a step overflowed"
        if self._outside:
            self._rates.outside = self._outside
            self._say(f"the optimizer's step is not part of the recorded step: {self._outside}")
        self._taken = 0
        self._met: set[Hashable] = set()
        self._seen: dict[Hashable, _Seen] = {}
        self._recorded: dict[Hashable, _Recorded] = {}
        self._refused: set[Hashable] = set()
        self._last: _Recorded | None = None
        self._begun = self._ever = self._denied = False
        self._attributes: Attributes | None = None
        self._options: Options | None = None
        self._replays = self._in_vain = 0
        self._changing = ""

    @property
    def ran(self) -> str:
        """What really ran: ``eager`` where steps were taken and none was recorded."""
        return self.kind if self._ever or not self._begun else "eager"

    @property
    def at_the_end(self) -> list[str]:
        """Lines for the user where the run ends here: that no step was recorded, if nothing else says so."""
        return [TOO_SHORT] if self._begun and not self._ever and not self._denied else []

    def run(self, share: Share, step: int, tally: Tally | None = None) -> Outcome:
        """Take optimizer step number ``step`` on a share: see ``StepCore.run``."""
        core = self.core
        self._begun = True
        if core.prepare(share):
            self._void("parameters of the model, or attributes of the loss, keep")
        elif self._attributes is not None and not self._attributes.unchanged():
            self._void(f"{self._attributes.change() or 'the order of attributes'} keeps")
        self._rates.adapt()
        self._rates.fill()
        form = self._form(share, tally)
        recorded = None
        if form is not None and form not in self._refused:
            recorded = self._recorded.get(form)
            if recorded is None and form in self._seen:
                recorded = self._record(form, share, tally)
        if recorded is not None:
            return self._again(recorded, share, step, tally)
        keys = core.keys(share, step)
        if form is None or form in self._refused:
            return self._as_it_is(share, keys, tally)
        # Compiled code is made when a form is met for the first time.
        new = not self._traced and form not in self._met
        known = len(self._met) if new else len(self._seen) + len(self._recorded)
        if known >= MOST_FORMS:
            self._deny(f"batches have more than {MOST_FORMS} forms: the others are not recorded")
            return self._as_it_is(share, keys, tally)
        self._met.add(form)
        if self._taken < WARM_UP or new:
            return self._as_it_is(share, keys, tally)
        return self._look(form, share, keys, tally)

    def forget(self) -> None:
        """Forget all recordings: what they read or write may have moved, or ends with the run.

        A group of ranks cannot end while recordings hold its collectives.
        """
        for made in self._recorded.values():
            if made.recording is not None:
                made.recording.close()
        self._seen.clear()
        self._recorded.clear()
        self._refused.clear()
        self._last, self._attributes, self._taken, self._replays = None, None, 0, 0

    def _form(self, share: Share, tally: Tally | None) -> Hashable | None:
        if self._in_vain > _MOST_IN_VAIN:
            self._deny(f"steps are not recorded: {self._changing} changing between them")
            return None
        options = self._rates.options()
        if self._options is not None and options != self._options:
            names = ", ".join(changed(self._options, options)) or "which parameters there are"
            taken = self._taken
            self._void(f"options of the optimizer beside its learning rate ({names}) keep")
            # Nothing happens anew but the recording.
            self._taken = taken
        self._options = options
        try:
            form = (form_of(share), tally is not None)
            hash(form)
        except (UnsuitedError, TypeError) as error:
            self._deny(f"steps are not recorded: {error}")
            return None
        return form

    def _void(self, what: str) -> None:
        """Forget recordings since something has changed between steps: ``what``, with its verb, if that goes on."""
        self._in_vain = self._in_vain + 1 if self._replays < _FEW_REPLAYS else 0
        self._changing = what
        self.forget()

    def _as_it_is(self, share: Share, keys: list[int], tally: Tally | None) -> Outcome:
        return self._taken_as_it_is(share, Keyed(keys, self.core.device), tally, nullcontext())

    def _taken_as_it_is(self, share: Share, draws: Draws, tally: Tally | None, looking: Any) -> Outcome:
        """Take a step one operation after another. ``looking`` is open around what a recording would hold."""
        core = self.core
        core.forget()
        self._last = None
        self._taken += 1
        with looking:
            outcome, penalty = self._work(share, draws, tally)
        if self._outside:
            core.begin_update(draws)
            penalty = core.update()
        core.advance()
        return outcome if penalty is None else outcome.plus(penalty)

    def _work(self, share: Share, draws: Draws, tally: Tally | None) -> tuple[Outcome, Tensor | None]:
        """Do what a recording holds. Return the outcome, and the penalty if there is one."""
        outcome = self.core.gradients(share, draws, tally)
        if self._outside:
            return outcome, None
        self.core.begin_update(draws)
        with self._rates.on_device():
            return outcome, self.core.update()

    def _look(self, form: Hashable, share: Share, keys: list[int], tally: Tally | None) -> Outcome:
        """Take a step as it is, and see whether it could be recorded."""
        core = self.core
        draws, own = Watched(keys, core.device), self._own_tally(tally)
        inputs = FixedInputs(share, core.device)
        inputs.fill(share)
        state = self._host_state()
        log = OperationLog() if self._traced else NoLog()
        found: list[str] = []
        with ExitStack() as looking:
            looking.enter_context(waits(found))
            looking.enter_context(log)
            outcome = self._taken_as_it_is(inputs.share, draws, own, looking)
        if tally is not None and own is not None:
            tally.merge(own)
        reason = draws.on_host() or state.change()
        if found:
            named = core.model.named_parameters()
            reason = why_read(found, [name for name, p in named if p.requires_grad and p.grad is None])
        if reason:
            self._refuse(form, reason)
        else:
            log.held.clear()
            self._seen[form] = _Seen(inputs, log, len(keys) if draws.on_device() else 0)
        return outcome

    def _record(self, form: Hashable, share: Share, tally: Tally | None) -> _Recorded | None:
        core, seen = self.core, self._seen[form]
        made = _Recorded(
            FixedInputs(share, core.device),
            self._own_tally(tally),
            seen.places > 0,
        )
        # Nothing reads them while they are recorded, but what looks at a number must not meet a strange one.
        made.inputs.fill(share)
        log = OperationLog() if self._traced else NoLog()
        state = self._host_state()
        core.forget()
        core.signs.on_device = True
        grads = [parameter.grad for parameter in core.parameters]

        def work(draws: Draws) -> None:
            if made.tally is not None:
                made.tally.restart()
            with log:
                outcome, penalty = self._work(made.inputs.share, draws, made.tally)
            made.own = core.signs.own
            made.outcome = outcome if penalty is None else outcome.plus(penalty)
            made.packed = made.outcome.packed()

        reason: str | None
        try:
            made.recording = self._recorder.record(work, seen.places)
            made.left = core.group.trace.left
            reason = seen.log.difference(log) or state.change()
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        core.signs.on_device = False
        core.forget()
        if reason:
            # The step that follows notes its collectives itself.
            core.group.trace.left = 0
            for parameter, grad in zip(core.parameters, grads, strict=True):
                parameter.grad = grad
            self._refuse(form, reason)
            return None
        made.grads = [(parameter, parameter.grad) for parameter in core.parameters]
        made.held = [*log.held.values()]
        self._recorded[form] = made
        self._seen.pop(form)
        self._ever = True
        if self._attributes is None:
            optimizer = None if self._outside else core.optimizer
            self._attributes = Attributes(
                core.model, [core.job.loss, *self._around], optimizer, self._elsewhere
            )
        return made

    def _again(self, made: _Recorded, share: Share, step: int, tally: Tally | None) -> Outcome:
        core = self.core
        # Working them out takes as long as a launch: not for what draws nowhere.
        keys = core.keys(share, step) if made.draws or self._outside else []
        assert made.recording is not None
        assert made.outcome is not None
        assert made.packed is not None
        made.inputs.fill(share)
        core.signs.tell(made.own)
        if made.draws:
            made.recording.seed(keys)
        made.recording.replay()
        self._replays += 1
        core.group.trace.left = made.left
        if self._last is not made:
            for parameter, grad in made.grads:
                parameter.grad = grad
            self._last = made
        if tally is not None and made.tally is not None:
            tally.merge(made.tally)
        outcome = made.outcome.unpacked(made.packed.clone())
        if self._outside:
            core.begin_update(Keyed(keys, core.device))
            penalty = core.update()
            self._last = None
            outcome = outcome if penalty is None else outcome.plus(penalty)
        core.advance()
        return outcome

    @property
    def _around(self) -> list[Any]:
        job = self.core.job
        return [*job.metrics.values(), *([] if job.penalty is None else [job.penalty])]

    def _host_state(self) -> HostState:
        others = [self.core.job.loss, self.core.rule, *self._around]
        return HostState(self.core.model, others, self._elsewhere)

    def _own_tally(self, tally: Tally | None) -> Tally | None:
        """Return a tally that a step fills from the start, if it fills one: a recording adds to the same always."""
        return (
            None
            if tally is None
            else Tally([*self.core.job.metrics], self.core.device, tally.rows, tally.doubts, tally.lengths)
        )

    def _refuse(self, form: Hashable, reason: str) -> None:
        self._refused.add(form)
        self._seen.pop(form, None)
        self._deny(f"steps are not recorded, but taken one operation after another: {reason}")

    def _deny(self, why: str) -> None:
        self._denied = True
        self._say(why)

    def _say(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)
