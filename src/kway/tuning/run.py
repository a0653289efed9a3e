"""Tuning of one job on the ranks that will train it: what was chosen before, or what measuring chooses now."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from kway.comm.group import Group
from kway.comm.meeting import meeting
from kway.data.arrays import InMemory
from kway.data.order import KeyedOrder
from kway.data.parts import Parts
from kway.data.streams import StreamOrder
from kway.devices import busy, cpu
from kway.devices.compilers import missing
from kway.errors import UsageError, line_of
from kway.job import Job
from kway.launch.status import Status
from kway.records import Plan
from kway.strategies.micro_batches import why_whole
from kway.training.on_a_copy import copied
from kway.training.own_data import on_own_data
from kway.training.parts import training_parts
from kway.training.wish import Wish
from kway.tuning.kept import Kept, facts, keep, recall
from kway.tuning.knobs import Choice, Subject, stages, untried
from kway.tuning.loading import why_once, workers_of
from kway.tuning.search import Found, Reading, search
from kway.tuning.time_left import lacking_time
from kway.tuning.trial import ORDERS, Trials, compiles
from kway.units import counted
from kway.world import StopRequest, World

# By default at most this part of the expected run, and never more seconds than this.
PART, MOST_S = 0.05, 60.0
# Steps of a run of which PART is worth a look: the step as it is takes some forty of them.
LEAST_STEPS = 2000
# A choice of which parts were left out for want of time is made anew, unasked, where there is so many times as much.
MUCH_MORE = 2.0
# Steps that are compared: a recorded step is recorded by then, others are the same from the first on.
COMPARED = {"cuda": 6, "cpu": 2}
# Seconds of a compilation before one was seen, and by layer; by mode how many times as long. On one H200 LeNet took
# 15 s and ResNet-18 26 s; on a slower host before, 39 s.
FIRST_S = {"cuda": (10.0, 0.4), "cpu": (15.0, 1.0)}
LONGER = {"searched": 5.0, "max-autotune": 10.0}
# What a longer mode is said to take, by that. Its search goes by how many kernels there are and how many variants each
# has, of which one compilation tells only its seconds: for ResNet-18 on one H200 it took 123 s after one of 24 s. That
# is one case and no bound, and a busy machine adds to it. What is left out is said, and more time can be given; what
# ends late cannot be taken back.
MARGIN = 1.25
# Of a compilation, where all kernels are there and only the way to them is new. What a longer mode has found is kept
# beside its kernels (torch._inductor.runtime.autotune_cache), and nothing is searched again. On one H200 it was 0.9 of
# 15 s for LeNet and 3.5 of 26 s for ResNet-18.
AGAIN = 0.2
# What of a choice makes other kernels.
KERNELS = ("memory_format", "compile_mode", "attention", "overlap", "precision", "micro_batch")


@dataclass(frozen=True)
class Tuned:
    """``choice``; ``how``: ``"measured"``, ``"remembered"`` or ``"left"``, with ``why`` where it was left.

    ``seconds`` that it took, ``made``: when it was measured; ``found``: what was looked at, where it was measured now;
    ``untried``: what could not be a candidate here, and why. ``busy``: what other programs kept busy when it was
    measured, like ``1.8 of 2 processors``, or ``""``. ``undecided``: see ``Found``.
    """

    choice: Choice
    how: str
    why: str = ""
    seconds: float = 0.0
    made: str = ""
    found: Found | None = None
    untried: str = ""
    busy: str = ""
    undecided: bool = False


def tune(
    world: World,
    job: Job,
    plan: Plan,
    model: nn.Module,
    wish: Wish,
    length: tuple[int, int | None],
    status: Status,
    say: Callable[[str], None],
    stop: StopRequest,
) -> Tuned:
    """Choose how the steps of a job run, by measurement or from memory. A collective: all ranks get the same answer.

    ``length``: how many epochs the run will take, and how many steps at most. ``say`` is told what goes on. Nothing
    more is tried once ``stop`` is set on any rank.
    """
    begun = time.perf_counter()
    parts = training_parts(replace(job, validation=None))[0]
    group, own = Group(world.rank, world.size), world
    if why := _not_repeatable(parts):
        return Tuned({}, "left", why)
    job = replace(job, batch_size=parts.order.batch_size)
    if plan.exactness == "bits":
        job, plan, own = _one_shard(job, plan, world)
    with status.doing("tune"):
        subject = _subject(job, plan, model, wish, own, *workers_of(parts, wish))
        known = _known(job, plan, model, subject, own, parts) if world.is_main and not wish.allowed else None
        held = recall(known, wish.seconds) if wish.remembers and known is not None else None
        held = group.objects(held)[0]
        steps = (parts.order.steps(0) or 0) * length[0]
        steps = steps if length[1] is None else min(steps, length[1])
        if held is not None and not _has_more(held, wish, steps, parts):
            # Of no epochs: nothing is to be run. At bits a choice is part of them, whatever the length.
            why = _not_repaid(held, steps) if length[0] and plan.exactness != "bits" else ""
            choice = {} if why else held.choice
            return Tuned(choice, "remembered", why, made=held.made, busy=held.busy, undecided=held.undecided)
        if why := _not_measured(wish, steps, parts):
            return Tuned({}, "left", why)
        apart, why = _on_own_data(job, world)
        whys = group.objects(why or _not_copied(model, job))
        if any(whys):
            return Tuned({}, "left", next(filter(None, whys)))
        others = _others(group)
        for line in busy.said(others):
            say(line)
        say("measuring which way to run the steps is fastest")
        compared = COMPARED[torch.device(world.device).type]
        with meeting(group) as met:
            trials = Trials(own, group, met, apart, plan, model, status, compared)

            def lacking(step_s: float, rest_s: float) -> str:
                all_ = group.objects((time.perf_counter() - begun, bool(stop.by)))
                # By rank 0's clock.
                return lacking_time(
                    all_[0][0], rest_s, _seconds(wish, steps, step_s), any(by for _, by in all_)
                )

            left = trials.prepare(lacking, wish.seconds is not None)
            start = Reading() if left else trials.measure({})
            if left or start.refused or start.difference:
                left = left or start.refused or f"the step does not repeat itself: {start.difference}"
                return Tuned({}, "left", left, time.perf_counter() - begun)
            seconds = _seconds(wish, steps, start.median_s)
            budget = _Budget(trials, subject, begun, start, seconds, stop, say)
            # What ranks saw may differ, and so would the stages.
            seen, compiler = group.objects((trials.seen, subject.compiler))[0]
            subject = replace(
                subject, waits=seen.waits, attention=seen.attention, forms=seen.forms, compiler=compiler
            )
            if subject.workers is not None and any(whys := group.objects(why_once(apart))):
                subject = replace(subject, workers=None, no_workers=next(filter(None, whys)))
            found = search(stages(subject), budget.measure, budget.cost, budget.again, budget.left, start)
        # A moment that became busy meanwhile is one, too.
        others = others or _others(group)
        made = datetime.now(UTC).isoformat(timespec="seconds")
        if known is not None and not budget.stopped:
            there = math.inf if found.whole and not found.undecided else budget.seconds
            took = *_compiling(found, start, plan), there, start.median_s
            keep(known, Kept(found.best, made, *took, others, found.undecided))
        spent = time.perf_counter() - begun
        if line := budget.overrun(spent):
            say(line)
        return Tuned(
            found.best, "measured", "", spent, made, found, untried(subject), others, found.undecided
        )


def _others(group: Group) -> str:
    """Return what other programs keep busy where rank 0 is, while all ranks wait for it; ``""``: enough is left."""
    return str(group.objects(busy.taken(cpu.usable_cores()) if group.rank == 0 else "")[0])


def _known(
    job: Job, plan: Plan, model: nn.Module, subject: Subject, world: World, parts: Parts
) -> dict[str, Any] | None:
    """Return what a choice depends on; ``None`` where code of the user's that is asked for it raises."""
    try:
        return facts(job, plan, model, subject, world, parts)
    except Exception:
        return None


def _compiling(found: Found, start: Reading, plan: Plan) -> tuple[float, float]:
    """Return the seconds that compiling the choice took, and those that it wins in a step; zeros where none did."""
    if not compiles(found.best, plan) or compiles({}, plan):
        return 0.0, 0.0
    tried = [
        (row.choice, row.reading) for row in found.rows if row.reading is not None and row.reading.step_s
    ]
    # What has the same kernels finds them made, and takes less.
    made = [
        its.made_s
        for choice, its in tried
        if _kernels(choice) == _kernels(found.best) and compiles(choice, plan)
    ]
    gains = [start.median_s - its.median_s for choice, its in tried if choice == found.best]
    return max(made, default=0.0), max(gains, default=0.0)


def _has_more(held: Kept, wish: Wish, steps: int, parts: Parts) -> bool:
    """Whether a run that measures unasked has far more seconds for it than a choice was made in that lacked some."""
    if wish.seconds is not None or _not_measured(wish, steps, parts):
        return False
    return _seconds(wish, steps, held.step_s) > MUCH_MORE * held.seconds


def _not_measured(wish: Wish, steps: int, parts: Parts) -> str:
    """Return why nothing is measured for a run of so many steps as it was asked for, or ``""``."""
    if wish.why_not or wish.seconds is not None:
        return wish.why_not
    if not isinstance(parts.dataset, InMemory):
        # Its copy takes memory, and what it reaches by a global name would change with each sample that is read.
        return "samples are made by code of the user's own: tune_seconds asks for it all the same"
    return f"a run of fewer than {LEAST_STEPS:,} steps does not repay it" if steps < LEAST_STEPS else ""


def _not_repaid(held: Kept, steps: int) -> str:
    """Return why a run of so many steps is not compiled though the choice is, or ``""``."""
    if held.repays(steps):
        return ""
    return (
        f"compiling took {held.compiling_s:.0f} s on {held.made[:10]}, and {counted(steps, 'step')} would win "
        f"{steps * held.gain_s:.1f} s"
    )


def _not_repeatable(parts: Parts) -> str:
    """Return why trials cannot step over these batches, or ``""``."""
    if isinstance(parts.order, StreamOrder):
        return "a stream cannot be read twice"
    if not isinstance(parts.order, KeyedOrder):
        return "batches come in the order of a sampler of the user's own, which may not be asked more often"
    if parts.order.samples < parts.order.batch_size:
        return "there is no whole batch to measure with"
    return ""


def _on_own_data(job: Job, world: World) -> tuple[Job, str]:
    """Return the job of trials, whose samples are those of a copy, and why there is none, or ``""``."""
    try:
        return on_own_data(job, world.local_size), ""
    except UsageError as error:
        return job, error.got


def _not_copied(model: nn.Module, job: Job) -> str:
    """Return why trials cannot have copies of this rank's model and of what is called beside it, or ``""``."""
    held = [*model.parameters(), *model.buffers()]
    if len({each.untyped_storage().data_ptr() for each in held if each.nbytes}) < sum(
        1 for each in held if each.nbytes
    ):
        return (
            "parameters or buffers of the model are views of one storage, which those of a copy would not be"
        )
    try:
        copied(model, job)
    except Exception as error:
        return f"model, loss, penalty or metrics cannot be copied ({line_of(error)})"
    return ""


def _seconds(wish: Wish, steps: int, step_s: float) -> float:
    """Return how many seconds there are: those asked for, else a part of the run."""
    if wish.seconds is not None:
        return wish.seconds
    return min(MOST_S, PART * steps * step_s)


def _one_shard(job: Job, plan: Plan, world: World) -> tuple[Job, Plan, World]:
    """Return a job over one shard's shape on one device: what is chosen there holds for any number of devices."""
    assert job.batch_size is not None
    one = replace(plan, strategy="single", layout={}, device_set=[world.device], shards=1)
    shard = replace(job, batch_size=-(-job.batch_size // plan.shards))
    # Where a shard is computed on a CPU, it is on one thread.
    return shard, one, replace(world, rank=0, size=1, local_rank=0, local_size=1, threads=1)


def _subject(
    job: Job, plan: Plan, model: nn.Module, wish: Wish, world: World, workers: int | None, no_workers: str
) -> Subject:
    device = torch.device(world.device).type
    parameters = [parameter for _, parameter in model.named_parameters()]
    share = -(-(job.batch_size or 1) // world.size)
    batch = job.batch_size or 1
    cut = device == "cpu" and why_whole(job, model, plan.layout, plan.exactness, batch, plan.shards) is None
    return Subject(
        device=device,
        ranks=world.size,
        level=plan.exactness,
        precision=job.precision,
        threads=world.threads,
        step_kind=wish.step_kind,
        allowed=wish.allowed,
        compiler=missing(device) is None,
        images=any(parameter.dim() == 4 for parameter in parameters),
        gradient_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        workers=workers,
        no_workers=no_workers,
        micro_batch=min(share, job.micro_batch or share),
        may_be_cut=cut,
        named=frozenset(plan.settings).union(
            [] if job.workers is None else ["workers"], [] if job.micro_batch is None else ["micro_batch"]
        ),
    )


class _Budget:
    """Seconds that are left, and what trying a choice will take of them. ``begun``: since when they count.

    ``stopped``: whether none were left because ``stop`` was set on a rank. ``say`` is told what may take longer.
    """

    def __init__(
        self,
        trials: Trials,
        subject: Subject,
        begun: float,
        start: Reading,
        seconds: float,
        stop: StopRequest,
        say: Callable[[str], None],
    ) -> None:
        self._stop, self.stopped = stop, False
        self._say, self._compiled_s = say, 0.0
        self._trials, self._plain = trials, start.cost_s
        self.seconds, self._ends = seconds, begun + seconds
        # By rank 0's clock.
        self._trace_s = trials.group.objects(trials.trace_s)[0]
        fixed, each = FIRST_S[subject.device]
        leaves = sum(1 for module in trials.model.modules() if next(module.children(), None) is None)
        self._compiling = fixed + each * leaves
        self._made: set[tuple[object, ...]] = set()

    def left(self) -> float:
        """The seconds that are left by rank 0's clock, none once a rank was asked to stop: all ranks decide alike."""
        all_ = self._trials.group.objects((self._ends - time.perf_counter(), bool(self._stop.by)))
        self.stopped = self.stopped or any(stops for _, stops in all_)
        return 0.0 if self.stopped else float(all_[0][0])

    def cost(self, choice: Choice) -> float:
        """Seconds that trying a choice takes, about: as much as the step as it is, what has to be compiled, and what a
        precision is compared with.
        """
        trials = self._trials
        plain = self._plain
        if choice.get("precision", trials.job.precision) not in trials.standards:
            plain += (1 + ORDERS) * self._trace_s
        if not compiles(choice, trials.plan):
            return plain
        if _kernels(choice) in self._made:
            return self.again(choice) + plain - self._plain
        mode = choice.get("compile_mode", "")
        return plain + self._compiling * (LONGER[mode] * MARGIN if mode in LONGER else 1.0)

    def again(self, choice: Choice) -> float:
        """Seconds that measuring a choice takes once it was tried."""
        plan = self._trials.plan
        # A step that compiles as it is was made before it was timed: what making it once more takes is in its time.
        return self._plain + self._compiling * AGAIN * (compiles(choice, plan) and not compiles({}, plan))

    def measure(self, choice: Choice) -> Reading:
        """Try a choice, and learn from it how long compiling takes."""
        compiled = compiles(choice, self._trials.plan)
        if compiled and not self._made and not self._compiled_s:
            left = max(0.0, self._ends - time.perf_counter())
            self._say(
                f"now compiling, for about {self._compiling:.0f} of the {left:.0f} s that are left; a busy machine "
                "takes longer, and what is begun is ended"
            )
        reading = self._trials.measure(choice)
        if compiled:
            self._compiled_s += reading.made_s or reading.cost_s
        if compiled and not reading.refused:
            if not self._made:
                self._compiling = reading.made_s
            self._made.add(_kernels(choice))
        return reading

    def overrun(self, spent: float) -> str:
        """Say by how much ``spent`` seconds are more than there were, and for what; ``""`` where they are not."""
        over = spent - self.seconds
        if over < max(1.0, self.seconds / 20):
            return ""
        compiling = f", {self._compiled_s:.0f} of them compiling" if self._compiled_s else ""
        return f"measuring took {spent:.0f} s{compiling}: {over:.0f} s more than the {self.seconds:.0f} s there were"


def _kernels(choice: Choice) -> tuple[object, ...]:
    return tuple(choice.get(name) for name in KERNELS)
