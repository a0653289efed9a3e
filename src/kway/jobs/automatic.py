"""Where a run gets its layout from: a plan that is given, or one that is made for it (``strategy="auto"``)."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kway.devices import busy
from kway.devices.topology import discover
from kway.errors import NotMeasuredError, UsageError
from kway.job import Job
from kway.jobs.asked import Asked, asked_of
from kway.jobs.identity import differs, identity_of
from kway.jobs.known_costs import Known, gather, is_more_known, kinds_for
from kway.jobs.place import Place, place
from kway.jobs.ranking import ranked
from kway.jobs.slowed import beside_others, slowed
from kway.jobs.tuning import first_kind
from kway.launch.torchrun import from_environment
from kway.planned import Planned, short_set, spelled_set, titled
from kway.planning import doubts, history
from kway.planning.candidates import Candidate, Left
from kway.records import Training
from kway.report.plans import left_out, trust
from kway.step.build import build
from kway.step.kinds import KINDS
from kway.strategies.layout import AUTO, one_process
from kway.strategies.levels import DEFAULT_SHARDS
from kway.training.parts import training_parts
from kway.units import counted, seconds_text, shown

# What finding out what is not known yet may take, in seconds, about: starting ranks is not in our hands.
MOST_S = 10.0
# A choice that took longer says how long.
SAID_S = 1.0

# Whether later plans know what came of a prediction.
KEPT = "what steps took is kept beside what was predicted: later plans on this machine go by how far that was off"
NOT_KEPT = (
    "what steps took is not kept for later plans: what was predicted rests on times of a busy moment, and so does "
    "what it was off by"
)


@dataclass(frozen=True)
class Going:
    """How a run is to go, as ``kway.train`` takes it; ``row`` of plan.json: what was predicted; ``lines`` on it.

    ``of_a_busy_moment``: whether what was predicted rests on times beside other programs; ``since``: when it began;
    ``needing``: options that need a process a device, with the reason of each. ``planned_kind``: the step kind that
    was chosen with the layout, for a run that tuning says nothing of.
    """

    job: Job
    devices: Any
    strategy: Any
    step_kind: str
    exactness: str
    shards: int
    row: Mapping[str, Any] | None = None
    lines: tuple[str, ...] = ()
    of_a_busy_moment: bool = False
    since: busy.Moment | None = field(default_factory=busy.moment)
    needing: Mapping[str, str] = field(default_factory=dict)
    planned_kind: str | None = None

    def place(self, patient: bool, settings: Mapping[str, Any] | None) -> Place:
        """Return where the run goes. Raises ``UsageError``. ``patient``: see ``kway.jobs.place.place``."""
        strategy = AUTO if self.strategy is None else self.strategy
        kind = first_kind(self.step_kind)
        where = place(self.devices, strategy, self.exactness, self.shards, patient, kind, settings)
        return replace(where, notices=(*self.lines, *where.notices))

    def judged(self, record: Training, where: Place) -> Training:
        """Return the record of the run with what was predicted of it and why it took far longer, and keep how far
        that was off.

        Nothing of a run that went otherwise: that lost devices, say. Kept is only what is of the same step: not where
        tuning or the user chose another one. Nor is what a busy moment made of the prediction, or of the run.
        """
        row = self.row
        if row is None and where.joined is None:
            return replace(record, notices=[*record.notices, *beside_others(record, self.since)])
        if row is None or record.device_set != row["device_set"] or record.layout != row["layout"]:
            return record
        measured = record.measured_step_s
        tuned = (record.tuned or {}).get("choice") or record.settings
        # Ranks that others started may still be at their end, and are no other programs.
        lines = [] if where.joined is not None else slowed(record, row["step_s"])
        is_its_step = not tuned and record.step_kind == row["step_kind"]
        # What others held up tells nothing of the model.
        if where.is_main and measured and is_its_step and not lines:
            made = datetime.now(UTC).isoformat(timespec="seconds")
            kept = {**row, "measured_step_s": measured, "error": row["step_s"] / measured - 1}
            if not self.of_a_busy_moment:
                history.keep(history.facts_of(discover()), [history.entry(kept, record.model, made)])
            lines = [NOT_KEPT if self.of_a_busy_moment else KEPT]
        return replace(record, predicted_step_s=row["step_s"], notices=[*record.notices, *lines])


def foreseen(
    plan: Any, going: Going, ranks: Any, say: Callable[[str], None], check: Callable[[], None]
) -> Going:
    """Return how a run goes by the plan that is given, or that is made for ``strategy="auto"``; else as it is named.

    ``check``: see ``automatic``. Raises ``UsageError``: see ``by_plan`` and ``automatic``.
    """
    if plan is not None:
        return by_plan(plan, going)
    return automatic(going, ranks, say, check) if going.strategy == AUTO else going


def by_plan(plan: Any, going: Going) -> Going:
    """Return a run as a plan has it. ``plan``: the record, or its file.

    Raises ``UsageError`` where the plan is of another job or of a machine that is not here, and where devices,
    strategy or step kind are named beside it.
    """
    if not isinstance(plan, Planned | str | Path):
        raise UsageError(
            f"plan is of type {type(plan).__name__}",
            "it must be what kway.plan returns, or the path of plan.json",
        )
    record = plan if isinstance(plan, Planned) else Planned.load(Path(plan))
    row, job = record.best, going.job
    if record.estimate_only:
        raise UsageError(
            f"a plan for a machine that is not here ({titled(row)})",
            "a run needs the devices that it names",
            "plan for this machine",
        )
    named = {
        "devices": (going.devices, AUTO),
        "strategy": (going.strategy, None),
        "step_kind": (going.step_kind, AUTO),
    }
    for name, (given, usual) in named.items():
        if given != usual:
            raise UsageError(
                f"plan and {name}={shown(given)}", f"the plan says {titled(row)}", "leave one out"
            )
    if job.batch_size is None and not isinstance(job.data, torch.utils.data.DataLoader):
        job = replace(job, batch_size=row["batch_size"])
    order = training_parts(replace(job, validation=None))[0].order
    # A plan's batch is as it is taken: it has no more samples than there are.
    batch = order.batch_size if order.samples is None else min(order.batch_size, order.samples)
    for what, got, need in (
        ("model", *_models(record, job)),
        ("precision", record.precision, job.precision),
        ("batch size", row["batch_size"], batch),
    ):
        if got != need:
            raise UsageError(f"a plan for {what} {got}", f"the job has {need}", "plan it anew: kway plan")
    # More than was asked for is kept, too; less never is. Nobody names the usual number of shards.
    if going.exactness != record.level and (going.exactness, record.level) != ("math", "bits"):
        raise UsageError(
            f"a plan for exactness {record.level}",
            f"the run is asked for {going.exactness}",
            f"name the plan's, exactness {record.level}, or plan it anew: kway plan",
        )
    if record.level == "bits" and going.shards not in (DEFAULT_SHARDS, record.shards):
        raise UsageError(
            f"a plan for {record.shards} shards", f"the run is asked for {going.shards}", "leave shards out"
        )
    line = f"as planned on {record.made[:10]}: {titled(row)}, {seconds_text(row['step_s'])} a step predicted"
    devices = spelled_set(row["device_set"])
    return Going(
        job, devices, row["strategy"], row["step_kind"], record.level, record.shards, row, (line,),
        doubts.of_a_busy_moment(record), needing=going.needing,
    )  # fmt: skip


def _models(record: Planned, job: Job) -> tuple[str, str]:
    """Return of which model a plan is, and which one the job has: the same where nothing tells them apart."""
    if record.model != job.title or not record.identity:
        return record.model, job.title
    unlike = differs(job.title, record.identity, record.versions, identity_of(build(job)))
    return (job.title, job.title) if unlike is None else unlike


def automatic(
    going: Going, ranks: Any, say: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Going:
    """Plan a run and return it as was chosen; inside ranks that are there as it is: their number is given.

    Devices ``"auto"``: every number of GPUs, of CPU ranks where there is none; else the device set to use. Step kinds
    where none is named: those that need no compiler, and what else is remembered of the model; at level bits eager
    ones, since a kind is a part of the bits. What is not remembered of model and machine is found out now, in
    ``MOST_S``, about; nothing is, where one candidate alone is left.
    Raises ``UsageError`` for what cannot be planned, and where the model fits nowhere. What cannot be priced for want
    of a figure runs all the same. ``check`` raises what is wrong on any layout, before this takes time.
    """
    begun = time.perf_counter()
    cluster = discover()
    world = from_environment(device="cuda" if cluster.gpus else "cpu")
    if world is not None and world.size > 1:
        return going
    is_free = going.step_kind == AUTO and going.exactness != "bits"
    # Compiling takes longer than a choice may; `kway plan` and `kway tune` look at it.
    quick = [kind.name for kind in KINDS.values() if not kind.compiles]
    kinds = quick if is_free else [first_kind(going.step_kind)]
    asked = asked_of(
        going.job, going.devices, AUTO, going.exactness, going.shards, kinds, cluster=cluster, needing=going.needing
    )  # fmt: skip
    if going.devices == AUTO and cluster.gpus:
        asked = replace(asked, sets=[each for each in asked.sets if each[0] != "cpu"])
    check()
    found, left = asked.candidates(lambda device: kinds_for(kinds, device))
    if len(found) == 1 and not (is_free and is_more_known(asked, found[0].device_type)):
        return _only(going, found[0], left)
    known = gather(asked, {}, None, ranks, _announced(going.job, say), seconds=MOST_S)
    if is_free:
        timed = {kind for each in known.workloads.values() for kind in each.step_kinds()}
        asked = replace(asked, step_kinds=[kind for kind in KINDS if kind in timed])
    try:
        record = ranked(asked, known, begun)
    except NotMeasuredError as error:
        return _unpriced(going, asked, known, error)
    row = record.best
    return replace(
        going,
        devices=spelled_set(row["device_set"]),
        strategy=row["strategy"],
        row=row,
        planned_kind=row["step_kind"] if is_free else None,
        lines=told(record),
        of_a_busy_moment=doubts.of_a_busy_moment(record),
    )


def _only(going: Going, one: Candidate, left: Sequence[Left]) -> Going:
    """Return a run as the one candidate that there is: what it would cost decides nothing, and is not found out."""
    line = (
        f"auto: {one.strategy} on {short_set([*one.device_set])}, the only candidate: nothing is profiled for it, and "
        "nothing predicted"
    )
    devices = spelled_set([*one.device_set])
    lines = (line, *left_out([each.to_dict() for each in left]))
    return replace(going, devices=devices, strategy=one.strategy, lines=lines)


def _unpriced(going: Going, asked: Asked, known: Known, error: NotMeasuredError) -> Going:
    """Return a run as one of the layouts that are left, none of which has a price: processes before threads.

    A measurement leaves out what a busy machine keeps it from telling.
    """
    found, left = asked.candidates(lambda device: known.step_kinds(device, asked.step_kinds))
    chosen = min(found, key=lambda each: one_process(each.layout))
    layouts = {(each.strategy, each.device_set) for each in found}
    which = "the only layout that is left" if len(layouts) == 1 else f"of {counted(len(layouts), 'layout')}"
    line = f"auto: {chosen.strategy} on {short_set([*chosen.device_set])}, {which}, not priced: {error.need}"
    devices = spelled_set([*chosen.device_set])
    lines = (line, *left_out([each.to_dict() for each in left]), *known.notices)
    return replace(going, devices=devices, strategy=chosen.strategy, lines=lines)


def _announced(job: Job, say: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``say`` with a line before its first one: what goes on, and for how long."""
    lines = iter(
        [
            f"auto: what is not known of {job.title} and of this machine is found out now, in about {MOST_S:.0f} s "
            "(longer where single steps take long)"
        ]
    )

    def announced(text: str) -> None:
        for line in lines:
            say(line)
        say(text)

    return announced


def told(record: Planned) -> tuple[str, ...]:
    """Say in two lines what was chosen, and why; then what was left out, and what there is to note of the plan."""
    row = record.best
    count = counted(len(record.candidates), "candidate")
    trusted = next((line.partition(" ")[2].strip() for line in trust(record) if "on average" in line), "")
    first = f"auto: {titled(row)} of {count}, {seconds_text(row['step_s'])} a step predicted"
    first += f", found out in {seconds_text(record.seconds)}" if record.seconds > SAID_S else ""
    first += f" ({trusted})" if trusted else ""
    # A layout that is there with another step kind is not left out.
    there = [(each["strategy"], each["device_set"]) for each in record.candidates]
    left = [each for each in record.left if (each["strategy"], each["device_set"]) not in there]
    return first, f"why: {row['reason']}", *left_out(left), *record.notices
