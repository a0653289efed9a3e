"""Where a run gets its layout from: a plan that is given, or one that is made for it (``strategy="auto"``)."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kway.devices.topology import discover
from kway.errors import UsageError
from kway.job import Job
from kway.jobs.planning import AUTO, Asked, asked_of, planned
from kway.jobs.known_costs import gather_within
from kway.launch.torchrun import from_environment
from kway.planned import Planned, spelled_set, titled
from kway.planning import history
from kway.records import Training
from kway.report.plans import trust
from kway.step.kinds import DEFAULT_KIND
from kway.training.parts import training_parts
from kway.units import counted, seconds_text, shown

# What finding out what is not known yet may take, in seconds.
MOST_S = 10.0


@dataclass(frozen=True)
class Chosen:
    """How a run is to go: what ``kway.train`` takes, what was predicted of it (a row of plan.json), what to say of it."""

    job: Job
    devices: str
    strategy: str
    step_kind: str
    exactness: str
    shards: int
    row: dict[str, Any]
    lines: tuple[str, ...]

    def predicted_of(self, record: Training) -> float | None:
        """Return the predicted step time of a run that went as chosen, else ``None``: it lost devices, say."""
        same = record.device_set == self.row["device_set"] and record.layout == self.row["layout"]
        return float(self.row["step_s"]) if same else None

    def keep(self, record: Training) -> None:
        """Keep how far the prediction was off, where the run took the step that it was of."""
        predicted, measured = self.predicted_of(record), record.measured_step_s
        tuned = (record.tuned or {}).get("choice") or record.settings
        if predicted is None or measured is None or tuned or record.step_kind != self.row["step_kind"]:
            return
        row = {**self.row, "measured_step_s": measured, "error": predicted / measured - 1}
        made = datetime.now(UTC).isoformat(timespec="seconds")
        history.keep(history.facts_of(discover()), [history.entry(row, record.model, made)])


def foreseen(
    plan: Any,
    job: Job,
    devices: Any,
    strategy: Any,
    step_kind: str,
    exactness: str,
    shards: int,
    ranks: Any,
    say: Callable[[str], None],
) -> Chosen | None:
    """Return how a run is to go by the plan that is given, or made for ``strategy="auto"``; else ``None``.

    Raises ``UsageError``: see ``by_plan`` and ``automatic``.
    """
    if plan is not None:
        return by_plan(plan, job, devices, strategy, step_kind, exactness)
    return automatic(job, devices, step_kind, exactness, shards, ranks, say) if strategy == AUTO else None


def by_plan(plan: Any, job: Job, devices: Any, strategy: Any, step_kind: str, exactness: str) -> Chosen:
    """Return what a plan says of a run of ``job``. ``plan``: the record, or its file.

    Raises ``UsageError`` where the plan is of another job or of a machine that is not here, and where devices,
    strategy or step kind are named beside it.
    """
    if not isinstance(plan, Planned | str | Path):
        raise UsageError(
            f"plan is of type {type(plan).__name__}",
            "it must be what kway.plan returns, or the path of plan.json",
        )
    record = plan if isinstance(plan, Planned) else Planned.load(Path(plan))
    row = record.best
    if record.estimate_only:
        raise UsageError(
            f"a plan for a machine that is not here ({titled(row)})",
            "a run needs the devices it names",
            "plan without --on here",
        )
    for name, given, usual in (
        ("devices", devices, AUTO),
        ("strategy", strategy, None),
        ("step_kind", step_kind, AUTO),
    ):
        if given != usual:
            raise UsageError(
                f"plan and {name}={shown(given)}", f"the plan says {titled(row)}", "leave one out"
            )
    if job.batch_size is None and not isinstance(job.data, torch.utils.data.DataLoader):
        job = replace(job, batch_size=row["batch_size"])
    batch = training_parts(replace(job, validation=None))[0].order.batch_size
    for what, got, need in (
        ("model", record.model, job.title),
        ("precision", record.precision, job.precision),
        ("batch size", row["batch_size"], batch),
        ("exactness", record.level, record.level if exactness == "math" else exactness),
    ):
        if got != need:
            raise UsageError(f"a plan for {what} {got}", f"the job has {need}", "plan it anew: kway plan")
    lines = (
        f"as planned on {record.made[:10]}: {titled(row)}, {seconds_text(row['step_s'])} a step predicted",
    )
    return Chosen(
        job,
        spelled_set(row["device_set"]),
        row["strategy"],
        row["step_kind"],
        record.level,
        record.shards,
        row,
        lines,
    )


def automatic(
    job: Job,
    devices: Any,
    step_kind: str,
    exactness: str,
    shards: int,
    ranks: Any,
    say: Callable[[str], None],
) -> Chosen | None:
    """Plan a run of ``job`` and return what was chosen, ``None`` inside ranks that are there: they have a layout.

    ``devices``: ``"auto"`` for every number of GPUs, of CPU ranks where there is none; or the device set to use. What
    is not remembered of model and machine is found out now, in ``MOST_S`` at most. Raises ``UsageError`` for what
    cannot be planned, and where the model fits nowhere.
    """
    begun = time.perf_counter()
    cluster = discover()
    world = from_environment(device="cuda" if cluster.gpus else "cpu")
    if world is not None and world.size > 1:
        return None
    # Compiling takes longer than a choice may; `kway tune` looks at it.
    kinds = [DEFAULT_KIND] if step_kind == AUTO else [step_kind]
    asked = asked_of(job, devices, AUTO, exactness, shards, kinds, cluster=cluster)
    if devices == AUTO and cluster.gpus:
        asked = replace(asked, sets=[each for each in asked.sets if each[0] != "cpu"])
    known = gather_within(asked, MOST_S, ranks, say)
    record = planned(asked, known, begun)
    row = record.best
    kind = step_kind if step_kind != AUTO or row["step_kind"] == DEFAULT_KIND else row["step_kind"]
    return Chosen(
        job,
        spelled_set(row["device_set"]),
        row["strategy"],
        kind,
        exactness,
        shards,
        row,
        told(asked, record),
    )


def told(asked: Asked, record: Planned) -> tuple[str, ...]:
    """Say in two lines what was chosen, and why."""
    row = record.best
    count = counted(len(record.candidates), "candidate")
    trusted = next((line.partition(" ")[2].strip() for line in trust(record) if "on average" in line), "")
    first = f"auto: {titled(row)} of {count}, {seconds_text(row['step_s'])} a step predicted"
    return first + (f" ({trusted})" if trusted else ""), f"why: {row['reason']}"
