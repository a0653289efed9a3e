"""One choice tried on the real step: opened like a run, stepped over the run's own batches, timed, closed."""

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kway.comm.group import Group
from kway.comm.meeting import Meeting
from kway.comm.trace import Trace as Calls
from kway.data.loader import Share
from kway.errors import KwayError, UsageError, text_of
from kway.job import Job
from kway.launch.status import Status
from kway.proving.quiet import without_dropout
from kway.records import Plan
from kway.step.kinds import KINDS
from kway.step.outcome import Outcome
from kway.step.settings import OPTIMIZER_FORMS, takes_form
from kway.step.tally import Tally
from kway.strategies.engine import Engine
from kway.training.on_a_copy import open_on_copy
from kway.training.parts import training_parts
from kway.training.whole_batches import whole_batches, whole_shares
from kway.tuning.agreement import Standard, Trace, standard
from kway.tuning.compared import Compared, left_by, on_cpu
from kway.tuning.knobs import JOB, SETTINGS, Choice
from kway.tuning.search import Reading
from kway.world import World

Tensor = torch.Tensor
T = TypeVar("T")

WINDOWS = 5
# Seconds of a window at least, and steps: a shorter one would time the clock.
WINDOW_S, MOST_STEPS = 0.15, 200
ORDERS = 3
# The fewest of which anything comes: the step as it is, one candidate, and both once more.
LEAST_TRIALS = 4
# Seconds in which ranks that fail alike do so, at least: the others of one that fails alone never come.
ALIKE_S = 60.0


def applied(choice: Choice, job: Job, plan: Plan) -> tuple[Job, Plan]:
    """Return job and plan as a choice wants them."""
    own = {name: value for name, value in choice.items() if name in JOB}
    settings = {**plan.settings, **{name: value for name, value in choice.items() if name in SETTINGS}}
    kind = choice.get("step_kind", plan.step_kind)
    return replace(job, **own), replace(plan, step_kind=kind, settings=settings)


@dataclass(frozen=True)
class Seen:
    """What trials have shown: ``waits``, ``attention`` and ``forms`` of a ``Subject``."""

    waits: float = 0.0
    attention: bool = False
    forms: tuple[str, ...] = ()


@dataclass
class Trials:
    """Tries choices of one job on this rank; all ranks of ``group`` make the same calls, and come to ``meeting``.

    ``world``: where engines stand, alone at level bits. ``model``: as the run would begin with it.

    ``compared``: the first steps, of which the numbers are compared; each compared step is of another batch.
    """

    world: World
    group: Group
    meeting: Meeting
    job: Job
    plan: Plan
    model: nn.Module
    status: Status
    compared: int = 6
    standards: dict[str, Standard] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)

    def __post_init__(self) -> None:
        """Note where this rank computes."""
        self.device = torch.device(self.world.device)
        self.trace_s = self._step_s = 0.0
        self._quiet = False
        # Of the engine that is open now, and of how many steps it has begun.
        self._calls, self._begun = Calls(), 0

    def prepare(self, lacking: Callable[[float, float], str], asked: bool = True) -> str:
        """Take the compared steps as they are, to compare with; return why nothing can be compared, or ``""``.

        ``lacking`` is asked, with the seconds of a step and those that the rest takes until one candidate is tried and
        measured once more, why there is no time for it, ``""``: there is. What the user's code raises on all ranks
        alike is raised where tuning was ``asked`` for; else the run will say it. Raises ``KwayError`` where a rank
        fails alone. A collective.
        """
        all_, raised = self._together("the step as it is", lambda: self._prepared(lacking))
        failed = next((said for _, said, _ in all_ if said), "")
        if failed and asked:
            raise raised or KwayError(failed)
        return f"the step as it is failed: {failed}" if failed else str(all_[self.group.rank][0])

    def _prepared(self, lacking: Callable[[float, float], str]) -> str:
        own = self._own_trace({}, 0)
        if any(self.group.objects(own.drew)):
            # What is drawn differs from order to order and from kind to kind, and would hide what is wrong.
            self._quiet = True
            own = self._own_trace({}, 0)
            if any(self.group.objects(own.drew)):
                return "the model draws random numbers beside dropout, so that no two ways can be compared"
        # The first trace has paid for what happens once in a process: only its steps tell what others take.
        step_s = self.group.objects(self._step_s)[0]
        steps_s = self.compared * step_s
        rest_s = ORDERS * steps_s + LEAST_TRIALS * self._trial_s(step_s, steps_s)
        if why := lacking(step_s, rest_s):
            return why
        first = [self._own_trace({}, 1).trace]
        step_s, trace_s = self.group.objects((self._step_s, self.trace_s))[0]
        rest_s = (ORDERS - 1) * trace_s + LEAST_TRIALS * self._trial_s(step_s, trace_s)
        if why := lacking(step_s, rest_s):
            return why
        others = (
            self._own_trace({}, order).trace if order > 1 else first.pop() for order in range(1, 1 + ORDERS)
        )
        self.standards[self.job.precision] = standard(own.trace, others, self.job.precision)
        return ""

    def _trial_s(self, step_s: float, trace_s: float) -> float:
        """Return the seconds that a trial takes where a step and the compared ones take so many; see ``_tried``."""
        return (1 + self._quiet) * trace_s + 4 * step_s + WINDOWS * max(WINDOW_S, 2 * step_s)

    def measure(self, choice: Choice) -> Reading:
        """Try a choice. What cannot run, or does not agree, says so in the reading. A collective.

        Raises ``KwayError`` where a rank fails alone: the others wait for it in the midst of a step.
        """
        all_, _ = self._together(f"a way to run steps ({dict(choice)})", lambda: self._tried(choice))
        readings = [own or Reading(refused=said) for own, said, _ in all_]
        return _slowest(readings, max(seconds for *_, seconds in all_))

    def _together(
        self, what: str, call: Callable[[], T]
    ) -> tuple[list[tuple[T | None, str, float]], Exception | None]:
        """Return what ``call`` returned on each rank, or what it raised in a line, and in how many seconds; and what it
        raised here.

        Only ranks that have begun as many collectives can go on together. Raises ``KwayError`` on those that come
        where one does not, or has begun others.
        """
        begun, own, raised, said = time.perf_counter(), None, None, ""
        self._calls, self._begun = Calls(), 0
        try:
            own = call()
        except Exception as error:
            raised, said = error, _said(error)
            # What failed holds all that it had computed, as long as anybody holds its traceback.
            traceback.clear_frames(error.__traceback__)
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - begun
        at = self._begun, self._calls.begun, self.group.trace.begun
        met = self.meeting.objects((own, said, seconds, at), max(ALIKE_S, seconds))
        if met is None or len({each for *_, each in met}) > 1:
            raise KwayError(
                f"while {what} was tried: {said or 'another rank failed'}",
                "not on all ranks alike, and the others wait inside of the step",
                "run without measuring: tune=False (--no-tune)",
            ) from raised
        return [(value, line, spent) for value, line, spent, _ in met], raised

    def _tried(self, choice: Choice) -> Reading:
        precision = str(choice.get("precision", self.job.precision))
        if precision not in self.standards:
            own = self._own_trace({"precision": precision}, 0).trace
            others = (
                self._own_trace({"precision": precision}, order).trace for order in range(1, 1 + ORDERS)
            )
            self.standards[precision] = standard(own, others, precision)
        begun = time.perf_counter()
        trace: Trace | None = None
        if self._quiet:
            with ExitStack() as opened:
                trace = self._compared(*self._open(choice, opened, quiet=True)).trace
        with ExitStack() as opened:
            engine, shares = self._open(choice, opened)
            # Where nothing is drawn, these are the steps that count.
            noisy = self._compared(engine, shares).trace
            # Recorded steps have been recorded by now.
            self._take(engine, shares, 2, self.compared)
            made = self._synchronised() - begun
            windows, waits = self._windows(engine, shares)
            if not choice:
                self.seen = replace(self.seen, waits=waits)
        difference = self.standards[precision].difference(noisy if trace is None else trace)
        return Reading(tuple(windows), made_s=made, difference=difference)

    def _open(self, choice: Choice, opened: ExitStack, quiet: bool = False) -> tuple[Engine, Iterator[Share]]:
        """Open an engine over a copy of the model, and the shares that it steps over. ``quiet``: without dropout."""
        job, plan = applied(choice, self.job, self.plan)
        around = without_dropout if quiet else None
        engine, parts = open_on_copy(job, self.model, plan, self.world, self.status, opened, around=around)
        self._calls = engine.mesh.world.trace
        # More loader workers than processors are tried on purpose.
        loader = engine.loader(parts, workers_named=False)
        opened.callback(loader.close)
        return engine, whole_shares(loader, parts.order.batch_size)

    def _own_trace(self, own: Choice, order: int) -> Compared:
        """Take the compared steps as they are, over samples in another order where ``order`` is not 0."""
        drawn, begun = np.random.default_rng(order), time.perf_counter()
        with ExitStack() as opened, _Calls(F.scaled_dot_product_attention) as calls:
            engine, shares = self._open(own, opened, quiet=self._quiet)
            if order:
                parts = training_parts(replace(self.job, validation=None))[0]
                shares = (
                    engine.cut(parts, drawn.permutation(parts.order.batch(epoch, step)), epoch, step)
                    for epoch, step in whole_batches(parts.order)
                )
            found = self._compared(engine, shares)
            forms = tuple(form for form in OPTIMIZER_FORMS if _takes(engine, form))
            self.seen = replace(self.seen, attention=self.seen.attention or calls.seen, forms=forms)
        self.trace_s = time.perf_counter() - begun
        return found

    def _compared(self, engine: Engine, shares: Iterator[Share]) -> Compared:
        """Take the compared steps and return what they left."""
        tally = _tally(engine)
        before = on_cpu(engine.state())
        outcomes, since = [], time.perf_counter()
        for step, share in zip(range(self.compared), shares, strict=False):
            outcomes.append(self._step(engine, share, step, tally))
            if step == 0 and self.compared > 1:
                # The first one pays for what happens once.
                since = self._synchronised()
        losses = tuple(float(outcome.loss) for outcome in outcomes)
        self._step_s = (time.perf_counter() - since) / max(1, self.compared - 1)
        return left_by(engine, before, losses)

    def _windows(self, engine: Engine, shares: Iterator[Share]) -> tuple[list[float], float]:
        """Return seconds a step of each window, and the part of them in which this rank waited for input."""
        step = self.compared + 2
        begun = self._synchronised()
        self._take(engine, shares, 2, step)
        one = self.group.objects((self._synchronised() - begun) / 2)[0]
        steps = min(MOST_STEPS, max(2, round(WINDOW_S / max(one, 1e-6))))
        step += 2
        windows, waited = [], 0.0
        for _ in range(WINDOWS):
            self.group.barrier()
            begun = self._synchronised()
            waited += self._take(engine, shares, steps, step)
            windows.append((self._synchronised() - begun) / steps)
            step += steps
        return windows, waited / max(1e-9, sum(windows) * steps)

    def _take(self, engine: Engine, shares: Iterator[Share], steps: int, first: int) -> float:
        """Take some steps; return the seconds in which the host waited for batches."""
        tally, waited = _tally(engine), 0.0
        for step in range(first, first + steps):
            since = time.perf_counter()
            share = next(shares)
            waited += time.perf_counter() - since
            self._step(engine, share, step, tally)
        return waited

    def _step(self, engine: Engine, share: Share, step: int, tally: Tally) -> Outcome:
        self._begun += 1
        self.status.beat()
        return engine.step(share, step, tally)

    def _synchronised(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _said(error: Exception) -> str:
    """Say in a line what failed."""
    if isinstance(error, UsageError):
        return error.got or type(error).__name__
    return f"{type(error).__name__}: {(text_of(error).splitlines() or [''])[0]}"


def _takes(engine: Engine, form: str) -> bool:
    """Whether the optimizer of an engine that has taken steps can go over its parameters as ``form`` says."""
    # Torch refuses to fuse over sparse gradients when it steps, not before.
    grads = (parameter.grad for parameter in engine.model.parameters())
    sparse = any(grad is not None and grad.is_sparse for grad in grads)
    return takes_form(engine.optimizer, form) and not (form == "fused" and sparse)


def _tally(engine: Engine) -> Tally:
    return engine.tally([*engine.job.metrics])


def _slowest(readings: list[Reading], cost_s: float) -> Reading:
    """Join the readings of ranks: a window lasts as long as on the slowest; what one refuses is refused."""
    refused = next((one.refused for one in readings if one.refused), "")
    difference = next((one.difference for one in readings if one.difference), "")
    if refused:
        return Reading(refused=refused, cost_s=cost_s)
    windows = tuple(max(each) for each in zip(*(one.step_s for one in readings), strict=True))
    return Reading(windows, cost_s, max(one.made_s for one in readings), difference)


class _Calls(TorchFunctionMode):
    """Sees whether a function of torch is called while open, under whatever name."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function, self.seen = function, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func is self._function
        return func(*args, **(kwargs or {}))


def compiles(choice: Choice, plan: Plan) -> bool:
    """Whether a choice goes through torch.compile."""
    return KINDS[choice.get("step_kind", plan.step_kind)].compiles
