"""``kway.plan``: every layout on every number of devices, priced, ranked and explained; checked by runs if wanted."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kway.devices import busy
from kway.errors import UsageError
from kway.job import Job
from kway.jobs.arguments import check_given, truth
from kway.jobs.asked import Asked, asked_of
from kway.jobs.checking import check as run_each
from kway.jobs.folder import claimed
from kway.jobs.given import measurements_given, workloads_given
from kway.jobs.known_costs import gather
from kway.jobs.ranking import ranked
from kway.launch.one_run import alone
from kway.planned import Planned
from kway.planning import decided, doubts, history
from kway.planning.order import judged
from kway.strategies.layout import AUTO
from kway.strategies.levels import DEFAULT_SHARDS
from kway.units import shown

# Files that a plan writes beside its record.
PICTURES = ("speedup.png", "terms.png")


@alone
def plan(
    job: Job,
    *,
    devices: Any = AUTO,
    strategy: Any = AUTO,
    exactness: str = "math",
    shards: int = DEFAULT_SHARDS,
    step_kind: Any = AUTO,
    batch_size_per_device: int | None = None,
    check: bool = False,
    on: Any = None,
    workload: Any = None,
    measurements: Any = None,
    refresh: bool = False,
    out: Path | str | None = None,
    ranks: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> Planned:
    """Price every layout of ``job`` on every number of devices; return them ranked, with the reasons.

    The model runs on one device only: what several devices cost comes from measurements of this machine, remembered
    or taken now. ``devices``: ``"auto"`` for every number of GPUs and of CPU ranks, or device sets as for
    ``kway.prove``. ``strategy``, ``step_kind``: ``"auto"`` for all (of step kinds those that take no compiler on a
    CPU), or names in a list or by commas. ``batch_size_per_device``: the global batch is that times the number of
    devices (weak scaling); without it all candidates take the job's batch (strong scaling). ``check``: run each
    candidate as ``kway.train`` does, in turns, and compare; the one that was measured fastest is chosen, and the errors
    are kept for later plans to show.
    ``on``: a machine that is not here, by its name (``"8xh100"``) or the path of its description: its GPUs are planned
    for, and all that is said of it is an estimate (docs/guide/elsewhere.md).
    ``workload``, ``measurements``: records, or their files, in place of what would be profiled and measured now;
    several workloads, one a type of device, in a list. ``refresh``: find out also what is remembered. ``out``: a
    folder for plan.json and pictures. ``ranks``: CPU ranks that are already started. ``say`` is told what goes on.

    Raises ``UsageError`` before anything starts for what cannot be planned, and where the model fits on none of the
    candidates: with how much is missing, and what would help.
    """
    begun = time.perf_counter()
    check_given(job, ranks, out=out)
    truth("check", check)
    truth("refresh", refresh)
    if not callable(say):
        raise UsageError(f"say={shown(say)}", "it must be a function that takes a line", "leave it out")
    if on is not None and (check or measurements is not None):
        raise UsageError(
            f"{'a check' if check else 'measurements'} of a machine that is not here ({shown(on)})",
            "nothing can run there",
            "leave one out",
        )
    cluster, there = None, None
    if on is not None:
        # Imported here: few plans need it.
        from kway.jobs.elsewhere import known_elsewhere, machine_there

        cluster, there, devices = machine_there(on, devices)
    asked = asked_of(
        job,
        devices,
        strategy,
        exactness,
        shards,
        step_kind,
        batch_size_per_device,
        cluster,
        is_here=on is None,
    )
    with ExitStack() as stack:
        folder = stack.enter_context(claimed(out, "plan.json", PICTURES)) if out is not None else None
        if there is not None:
            known = known_elsewhere(asked, there, workload, refresh, say)
        else:
            given = measurements_given(measurements)
            known = gather(asked, workloads_given(workload, asked), given, ranks, say, refresh)
        record = ranked(asked, known, begun, estimate_only=on is not None)
        if check:
            record = checked(asked, record, ranks, say, begun)
        if folder is not None:
            record.save(folder)
    return record


def checked(asked: Asked, record: Planned, ranks: Any, say: Callable[[str], None], begun: float) -> Planned:
    """Return the record with what runs of its candidates measured, and the fastest of them chosen; the errors are kept
    for later plans.

    Not those of a busy moment, nor of predictions from one: they would say of the model what the other programs did.
    """
    job = asked.job
    others = busy.taken(asked.cluster.cpu["usable"])
    lines = run_each(job, record.candidates, asked.level, asked.shards, say, ranks)
    if others:
        lines.append(
            f"checked while other programs kept {others} busy: steps may take far less without them, and later plans "
            "do not go by this check"
        )
    rests_on_it = doubts.of_a_busy_moment(record)
    if rests_on_it and not others:
        lines.append(
            "later plans do not go by this check: its predictions rest on times of a busy moment (see the notes)"
        )
    measured = [row for row in record.candidates if row.get("measured_step_s")]
    made = datetime.now(UTC).isoformat(timespec="seconds")
    facts = history.facts_of(asked.cluster)
    if not others and not rests_on_it:
        history.keep(facts, [history.entry(row, record.model, made) for row in measured])
    fastest = decided.fastest(record.candidates)
    chosen = record.chosen if fastest is None else fastest
    for row, reason in zip(
        record.candidates, decided.reasons(record.candidates, record.chosen, chosen), strict=True
    ):
        row["reason"] = reason
    return replace(
        record,
        chosen=chosen,
        check=judged(measured),
        history=history.summary(history.recall(facts)),
        seconds=time.perf_counter() - begun,
        notices=[*record.notices, *lines],
    )
