"""``kway.tune``: what was tried, and what was chosen, which is kept for later runs. ``kway.train`` asks here too."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.checkpoints.reading import open_checkpoint
from kway.errors import UsageError
from kway.job import PRECISIONS, Job
from kway.jobs.arguments import check_job, truth
from kway.jobs.folder import claimed
from kway.jobs.place import Place, on_main, place
from kway.jobs.resuming import as_begun
from kway.launch.blame import check_value
from kway.launch.one_run import alone
from kway.records import Plan, Training, Tuning
from kway.registry import known
from kway.report.tuning import choice_text
from kway.step.build import build
from kway.step.kinds import DEFAULT_KIND
from kway.strategies.layout import AUTO, check_model
from kway.strategies.levels import DEFAULT_SHARDS
from kway.training.parts import training_parts
from kway.training.spec import TrainSpec
from kway.training.surroundings import gpu_name, machine, versions
from kway.training.wish import Wish
from kway.tuning.knobs import Choice
from kway.tuning.run import Tuned
from kway.tuning.run import tune as tune_on_ranks
from kway.tuning.search import Reading, Row
from kway.tuning.trial import applied
from kway.units import shown

# What ``kway.tune`` takes where nobody says.
USUAL_S = 60.0
# Why a run measures nothing that memory or a rank has ended before.
STARTED_AGAIN = "a run that is started again measures nothing"
# Of a tuning in which something won that could not be judged a second time.
UNDECIDED = "it was not decided which way is fastest, since the machine changed meanwhile"
# A month: more is a mistake.
MOST_S = 2_678_400


@alone
def tune(
    job: Job,
    *,
    devices: Any = "auto",
    strategy: str = "auto",
    exactness: str = "math",
    shards: int = DEFAULT_SHARDS,
    step_kind: str = AUTO,
    settings: Mapping[str, Any] | None = None,
    seconds: float | None = USUAL_S,
    allow: Iterable[str] = (),
    refresh: bool = False,
    out: Path | str | None = None,
    ranks: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tuning:
    """Measure which way to take the steps of ``job`` is fastest here; return the record of what was tried.

    What is chosen counts for every later ``kway.train`` of the same model, batch, devices and versions on this machine;
    not where ``allow`` names a precision: that is another run, which nobody is given unasked.
    ``step_kind``, ``settings``: what is to stay as named. ``seconds``: at most, about; what would take longer than is
    left is not begun. ``allow``: precisions that may be chosen beside the job's own. ``refresh``: measure also what is
    known already. ``out``: a folder for tune.json. ``strategy``: ``"auto"`` is data parallelism over the devices,
    without a plan. The rest as for ``kway.train``. Raises ``UsageError`` before anything starts.
    """
    check_job(job)
    truth("refresh", refresh)
    if not callable(say):
        raise UsageError(
            f"say={shown(say)}", "it must be a function that takes a line", "leave it out for silence"
        )
    where = place(devices, strategy, exactness, shards, step_kind=first_kind(step_kind), settings=settings)
    if where.in_threads:
        raise UsageError(
            f"kway.tune with strategy {where.plan.strategy}",
            "its ranks are threads, whose steps are eager: there is nothing to choose from",
            "tune strategy data",
        )
    limit = USUAL_S if seconds is None else seconds
    wish = wish_of(True, limit, step_kind, exactness, allow, refresh, "seconds")
    assert wish is not None
    parts, _ = training_parts(replace(job, validation=None))
    model = build(job)
    check_model(
        job, model, where.plan.layout, exactness, parts.order.batch_size, shards, settings=where.plan.settings
    )
    sent = replace(job, model=model, init=None) if isinstance(job.model, nn.Module) else job
    if where.starts_ranks:
        check_value("job", sent)
    own = None if where.starts_ranks else model
    with ExitStack() as stack:
        folder = out
        if out is not None:
            # Claimed once for all ranks, the first of which names it.
            folder = on_main(where, lambda: str(stack.enter_context(claimed(out, "tune.json"))))
        tuned, gpus = where.run(
            tune_rank, sent, where.plan, wish, own, on_event=lambda event: say(event["text"]), ranks=ranks
        )[0]
        record = record_of(job, where, parts.order.batch_size, tuned, wish, gpus)
        if folder is not None and where.is_main:
            record.save(Path(folder))
    return record


def tune_rank(
    context: Any, job: Job, plan: Plan, wish: Wish, model: nn.Module | None = None
) -> tuple[Tuned, list[str]]:
    """Tune on one rank. The task that ``tune`` sends."""
    module = build(job) if model is None else model
    tuned = tune_on_ranks(
        context.world, job, plan, module, wish, (0, None), context.status, _teller(context), context.stop
    )
    return tuned, [gpu_name(torch.device(context.world.device))]


def _teller(context: Any) -> Callable[[str], None]:
    """Return what tells the user a line, on rank 0."""
    main, emit = context.world.is_main, context.emit
    return lambda text: emit({"event": "notice", "text": text}) if main else None


def first_kind(step_kind: str) -> str:
    """Return the step kind that runs until another one is chosen."""
    return DEFAULT_KIND if step_kind == AUTO else step_kind


def wish_of(
    wanted: bool,
    seconds: float | None,
    step_kind: str,
    exactness: str,
    allow: Iterable[str] = (),
    refresh: bool = False,
    named: str = "tune_seconds",
) -> Wish | None:
    """Return how a run is to be tuned, ``None`` for not at all. Raises ``UsageError``. ``named``: what the user calls
    the seconds.

    Only where seconds are named: a step kind that the user has chosen, and level bits, where a choice is part of the
    bits, and what one run has measured another one must not take up unasked.
    """
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < MOST_S
    ):
        raise UsageError(
            f"{named}={shown(seconds)}", f"it must be a number of seconds greater than 0, below {MOST_S:,}"
        )
    if not truth("tune", wanted):
        if seconds is not None:
            raise UsageError(f"tune_seconds={seconds:g} and no tuning", "only one of them", "leave one out")
        return None
    if seconds is None and (exactness == "bits" or step_kind != AUTO):
        return None
    allowed = (allow,) if isinstance(allow, str) else tuple(allow) if hasattr(allow, "__iter__") else None
    if allowed is None:
        raise UsageError(
            f"allow={shown(allow)}", "it must be names of precisions", 'pass ["tf32", "bf16"], say'
        )
    for name in allowed:
        known("precision", name, PRECISIONS)
    return Wish(seconds, None if step_kind == AUTO else step_kind, allowed, not refresh)


def in_the_way_chosen(context: Any, spec: TrainSpec, model: nn.Module) -> TrainSpec:
    """Return a run as tuning chose it, with a line that says so; one that goes on, as it was begun. A collective."""
    if spec.resume is not None:
        return _as_begun(spec, spec.resume)
    planned = replace(spec.plan, step_kind=spec.planned_kind or spec.plan.step_kind)
    if spec.tune is None:
        return replace(spec, plan=planned)
    say, length = _teller(context), (spec.epochs, spec.steps)
    tuned = tune_on_ranks(
        context.world, spec.job, spec.plan, model, spec.tune, length, context.status, say, context.stop
    )
    job, plan = applied(tuned.choice, spec.job, planned if tuned.why or tuned.undecided else spec.plan)
    told = _told(tuned.how, tuned.choice, tuned.why, tuned.seconds, tuned.made, tuned.busy)
    return replace(
        spec, job=job, plan=plan, tuned=told, told=(*spec.told, *_lines(tuned, spec.tune, spec.planned_kind))
    )


def _as_begun(spec: TrainSpec, resume: str) -> TrainSpec:
    """Return a run that goes on from the checkpoint ``resume`` in the way that it was begun."""
    plan = as_begun(open_checkpoint(Path(resume)), spec.plan, not spec.as_begun)
    kept = {name: value for name, value in plan.settings.items() if spec.plan.settings.get(name) != value}
    if plan.step_kind != spec.plan.step_kind:
        kept["step_kind"] = plan.step_kind
    line = f"{choice_text(kept)}, as the run was begun (--step-kind and --settings name others)"
    told = _told("left", kept, "a run that goes on runs as it was begun")
    return replace(
        spec,
        plan=plan,
        tuned=told if kept or spec.tune is not None else None,
        told=(*spec.told, *([line] if kept else [])),
    )


def _told(
    how: str, choice: Choice, why: str, seconds: float = 0.0, made: str = "", busy: str = ""
) -> dict[str, Any]:
    """Return what a record says of how a run's steps were chosen. ``busy``: see ``Tuned.busy``."""
    return {
        "how": how, "why": why, "seconds": seconds, "made": made, "busy": busy, "choice": dict(choice)
    }  # fmt: skip


def _lines(tuned: Tuned, wish: Wish, planned_kind: str | None) -> list[str]:
    """Say in a line what was chosen for a run: nothing, where nothing was looked for or found."""
    is_planned = planned_kind is not None and (tuned.why or tuned.undecided)
    as_they_are = f"steps run {planned_kind}, as planned" if is_planned else "steps run as they are"
    text, beside = choice_text(tuned.choice), _beside(tuned)
    anew = "kway tune --refresh measures anew"
    nothing = f"{UNDECIDED} ({anew})" if tuned.undecided else "nothing was found that is faster"
    if tuned.how == "remembered" and tuned.why:
        return [f"{as_they_are}: {tuned.why} (--step-kind compiled: all the same)"]
    if tuned.how == "remembered":
        if tuned.choice:
            again = f"{anew}; " if beside else ""
            return [f"{text}, as measured on {tuned.made[:10]}{beside} ({again}--no-tune: as it is)"]
        return [
            f"{as_they_are}: on {tuned.made[:10]}{beside} {nothing}"
            + ("" if tuned.undecided else f" ({anew})")
        ]
    if tuned.how == "left":
        # A run that nobody asked to tune, and that tried nothing, has nothing to say.
        return [f"not tuned: {tuned.why}"] if tuned.seconds or wish.seconds is not None else []
    if not tuned.choice:
        return [f"{as_they_are}: in {tuned.seconds:.0f} s{beside} {nothing}"]
    sure = "once only" if tuned.found is None or tuned.found.again is None else "twice"
    return [f"{text}, as measured now, {sure}, in {tuned.seconds:.0f} s{beside} (--no-tune: as it is)"]


def _beside(tuned: Tuned) -> str:
    """Say beside whom a choice was measured, where other programs took too much."""
    return f" while other programs kept {tuned.busy} busy" if tuned.busy else ""


def record_of(job: Job, where: Place, batch_size: int, tuned: Tuned, wish: Wish, gpus: list[str]) -> Tuning:
    """Return the record of what was tried."""
    plan = where.plan
    rows = [] if tuned.found is None else tuned.found.rows
    plain = rows[0].reading if rows else None
    return Tuning(
        model=job.title,
        strategy=plan.strategy,
        devices=plan.devices,
        device_set=plan.device_set,
        exactness=plan.exactness,
        precision=job.precision,
        batch_size=batch_size,
        choice=dict(tuned.choice),
        how=tuned.how,
        why=tuned.why,
        made=tuned.made,
        rows=[_row(row, plain) for row in rows],
        seconds=tuned.seconds,
        budget_s=wish.seconds,
        plain_step_s=None if plain is None else plain.median_s,
        chosen_step_s=_step_s(rows, tuned.choice),
        notices=[
            *([f"{UNDECIDED}: kway tune --refresh measures anew"] if tuned.undecided else []),
            *(
                [f"measured{_beside(tuned)}: without them another choice may win (--refresh measures again)"]
                if tuned.busy
                else []
            ),
            *where.notices,
            *_taken_up(tuned, wish, plan.exactness),
            *([tuned.untried] if tuned.untried else []),
        ],
        versions=versions(),
        machine=machine(gpus),
        again=None if tuned.found is None else tuned.found.again,
        busy=tuned.busy,
    )


def _taken_up(tuned: Tuned, wish: Wish, exactness: str) -> list[str]:
    """Say of a choice which later runs take it up, where those do not that name nothing."""
    if not tuned.choice:
        return []
    if wish.allowed:
        precision = tuned.choice.get("precision")
        if precision is None:
            return [
                "kept nowhere, since other precisions were allowed: tune without --allow (allow=) to keep a choice"
            ]
        return [
            f"kept nowhere, since it is another run: name --precision {precision} (precision={precision!r}) in runs "
            "that are to have it, and tune with it for the rest"
        ]
    # As ``wish_of`` has it.
    asks = f"--tune-seconds {wish.seconds:g} (tune_seconds=)"
    if exactness == "bits":
        return [f"at level bits a run takes it up only where it asks: {asks}"]
    if wish.step_kind is not None:
        return [f"a run takes it up where it names --step-kind {wish.step_kind} as well and asks: {asks}"]
    return []


def _row(row: Row, plain: Reading | None) -> dict[str, Any]:
    reading = row.reading
    timed = reading if reading is not None and reading.step_s else None
    plain = row.plain or plain
    return {
        "stage": row.stage,
        "choice": dict(row.choice),
        "step_s": None if timed is None else timed.median_s,
        "spread": None if timed is None else timed.spread,
        "ratio": None if timed is None or plain is None else timed.median_s / plain.median_s,
        "cost_s": None if reading is None else reading.cost_s,
        "verdict": row.verdict,
    }


def as_run(plan: Plan, record: Training) -> Plan:
    """Return the plan with what tuning chose of the step that a run took."""
    choice = (record.tuned or {}).get("choice", {})
    return replace(plan, step_kind=choice.get("step_kind", plan.step_kind), settings=record.settings)


def _step_s(rows: list[Row], choice: Choice) -> float | None:
    times = [
        row.reading.median_s
        for row in rows
        if row.choice == choice and not row.is_again and row.reading is not None and row.reading.step_s
    ]
    return times[-1] if times else None
