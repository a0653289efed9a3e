"""Predictions checked by real runs: each candidate trained as ``kway train`` trains it, in turns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from torch import nn

from kway.errors import line_of
from kway.job import Job
from kway.jobs.training import train
from kway.planned import device_type, spelled_set, titled
from kway.strategies.layout import one_process
from kway.training.clock import LASTS, WARM_UP, WINDOW
from kway.training.on_a_copy import copied
from kway.training.own_data import on_own_data
from kway.units import counted, seconds_text

# How often each candidate runs: what else the machine does meanwhile then meets all of them.
ROUNDS = 3
# Seconds of steps that one run takes, about, and windows of steps.
RUN_S, LEAST_WINDOWS, MOST_WINDOWS = 1.5, 3, 30
# What a start takes, about: for what the user is told.
START_S = 4.0


def check(
    job: Job,
    rows: Sequence[dict[str, Any]],
    level: str,
    shards: int,
    say: Callable[[str], None],
    ranks: Any = None,
) -> list[str]:
    """Run every candidate that fits ``ROUNDS`` times, one after the other; return lines on what did not run.

    Rows get ``measured_step_s`` (the median of the runs), ``error`` and ``rounds``. Each run is one of ``kway.train``
    over copies of model and data, with the batch of its row, and without validation or tuning.
    """
    fit = [row for row in rows if row["fits"]]
    took = ROUNDS * sum(START_S * (row["devices"] > 1) + _steps_of(row) * row["step_s"] for row in fit)
    say(f"checking {counted(len(fit), 'candidate')} by {ROUNDS} runs each, about {seconds_text(took)}")
    failed: dict[str, str] = {}
    times: dict[int, list[float]] = {place: [] for place in range(len(fit))}
    warned = False
    for number in range(ROUNDS):
        # There and back: what gets slower with time meets the last as early as the first.
        for place in sorted(times, reverse=bool(number % 2)):
            row = fit[place]
            if titled(row) in failed:
                continue
            try:
                # Runs in this process warn of the same loss, each of them: the first is enough.
                here = row["devices"] == 1 or one_process(row["layout"])
                seconds = measured(job, row, level, shards, ranks, echo=here and not warned)
                warned = warned or here
            except Exception as error:  # of the user's code too: what one raises costs no other its check
                failed[titled(row)] = line_of(error)
                continue
            if seconds is None:
                failed[titled(row)] = "its run was too short to be timed"
                continue
            times[place].append(seconds)
            say(f"{titled(row)}: {seconds_text(seconds)} a step, {seconds_text(row['step_s'])} predicted")
    for place, found in times.items():
        row = fit[place]
        if found and titled(row) not in failed:
            row["measured_step_s"] = median(found)
            row["error"] = row["step_s"] / row["measured_step_s"] - 1
            row["rounds"] = found
    return [f"{name} was not checked: {why}" for name, why in failed.items()]


def steps_of(step_s: float, on_gpu: bool = False) -> int:
    """Return how many steps a run takes: whole windows after its warm-up, of about ``RUN_S`` together.

    Windows as ``StepClock`` has them: on a GPU they last a while, however fast steps are.
    """
    window = max(WINDOW, math.ceil(LASTS / step_s)) if on_gpu else WINDOW
    windows = math.ceil(RUN_S / (window * step_s))
    return WARM_UP + window * min(MOST_WINDOWS, max(LEAST_WINDOWS, windows))


def _steps_of(row: dict[str, Any]) -> int:
    return steps_of(row["step_s"], device_type(row["device_set"][0]) != "cpu")


def measured(
    job: Job, row: dict[str, Any], level: str, shards: int, ranks: Any = None, echo: bool = False
) -> float | None:
    """Train as a row says for some steps, with ``echo`` as ``kway.train`` has it; return the step time that the run
    reports.
    """
    steps = _steps_of(row)
    own = replace(on_own_data(job), validation=None, batch_size=row["batch_size"])
    if isinstance(job.model, nn.Module):
        # The user's own module is trained by nobody here.
        model, beside = copied(job.model, job)
        own = replace(own, model=model, **beside)
    run = train(
        own,
        devices=spelled_set(row["device_set"]),
        strategy=row["strategy"],
        exactness=level,
        shards=shards,
        step_kind=row["step_kind"],
        tune=False,
        epochs=steps,
        steps=steps,
        echo=echo,
        ranks=ranks if row["device_set"][0] == "cpu" else None,
    )
    return run.record.measured_step_s
