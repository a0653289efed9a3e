"""``kway.measure``: what this machine does in how long, measured now or remembered."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch

from kway.devices.cpu import threads_for
from kway.devices.select import parse, spelled
from kway.devices.select import warnings as device_warnings
from kway.devices.topology import discover
from kway.errors import RankError, UsageError
from kway.jobs.kept_ranks import KeptRanks
from kway.jobs.place import with_threads
from kway.launch.torchrun import from_environment
from kway.measurements import Measurements
from kway.measuring.bench import Bench
from kway.measuring.experiment import Experiment, chosen
from kway.measuring.kept import facts, keep, recall
from kway.measuring.limits import Limits, limits_of
from kway.measuring.timer import Policy, shrunk
from kway.records import Cluster
from kway.step.seeds import preserved_everywhere
from kway.training.surroundings import machine, versions
from kway.units import counted, seconds_text

# More CPU ranks than these say nothing new of one machine.
MOST_CPU_RANKS = 8
QUICK = Policy(rounds=7)
# Of a minute, loading torch and drawing pictures take the rest.
QUICK_S = 45.0
FULL = Policy(rounds=15, sample_s=5e-3)


def measure(
    *,
    devices: Any = "auto",
    only: Any = None,
    quick: bool = False,
    refresh: bool = False,
    seconds: float = QUICK_S,
    ranks: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """Measure this machine, or recall what was measured under the same hardware, driver and torch; return the record.

    ``devices``: the device set to measure, the CPU always with it. ``only``: names of experiments, in a list or by
    commas. ``quick``: a few sizes, in ``seconds`` in place of minutes; full figures that are remembered count as well.
    ``refresh``: measure also what is remembered. ``ranks``: CPU ranks that are already started. ``say`` is told what
    goes on. Raises ``UsageError`` before anything is measured.
    """
    begun = time.perf_counter()
    experiments = chosen(only)
    cluster, spec = discover(), spelled(devices)
    device_set = parse(spec, cluster)
    _check_alone(cluster)
    there = ("cpu", *dict.fromkeys(device for device in device_set if device != "cpu"))
    given = len(device_set) if device_set[0] == "cpu" and spec != "auto" else cluster.cpu["usable"]
    cpu_ranks = min(given, MOST_CPU_RANKS)
    threads = threads_for(1)
    known = facts(cluster, there, cpu_ranks, threads)
    entries, figures = [], []
    with with_threads(threads), preserved_everywhere(), KeptRanks(ranks) as on_ranks:
        limits = limits_of(cluster, there)
        for place, experiment in enumerate(experiments):
            bench = _bench(experiment, there, cpu_ranks, limits, quick, on_ranks)
            if quick:
                left = seconds - (time.perf_counter() - begun)
                bench.policy = shrunk(bench.policy, left, _planned(experiments[place:], there))
            entry, found = _one(experiment, bench, known, quick, refresh, say)
            entries.append(entry)
            figures += found
    dates = [entry["made"] for entry in entries if entry["made"]]
    return Measurements(
        machine=machine(_names(cluster, there), threads=threads, driver=cluster.driver),
        versions={**versions(), "cuda": str(torch.version.cuda)},
        devices=list(there),
        quick=quick,
        made=min(dates, default=""),
        age_s=max((entry["age_s"] for entry in entries), default=0.0),
        seconds=time.perf_counter() - begun,
        experiments=entries,
        figures=figures,
        notices=_notices(device_set, cluster, entries),
    )


def _names(cluster: Cluster, devices: tuple[str, ...]) -> list[str]:
    return [gpu["name"] for gpu in cluster.gpus if f"cuda:{gpu['index']}" in devices]


def _check_alone(cluster: Cluster) -> None:
    """Refuse to measure in every rank of a launch at once."""
    world = from_environment(device="cuda" if cluster.gpus else "cpu")
    if world is not None and world.size > 1:
        raise UsageError(
            f"measure inside {counted(world.size, 'rank')} that are already there",
            "they would measure each other; it starts ranks of its own",
            "call it in one process",
        )


def _bench(
    experiment: Experiment,
    devices: tuple[str, ...],
    cpu_ranks: int,
    limits: Limits,
    quick: bool,
    on_ranks: KeptRanks,
) -> Bench:
    policy = replace(QUICK if quick else FULL, seconds=experiment.seconds(quick, len(devices) - 1))
    return Bench(
        experiment.name,
        devices,
        experiment.sizes(quick),
        policy,
        limits,
        cpu_ranks=cpu_ranks,
        on_ranks=on_ranks,
    )


def _planned(experiments: Sequence[Experiment], devices: tuple[str, ...]) -> float:
    """Return the seconds that these would take in a quick measurement."""
    return sum(each.seconds(True, len(devices) - 1) for each in experiments if not each.lacks(devices))


def _one(
    experiment: Experiment,
    bench: Bench,
    known: dict[str, Any],
    quick: bool,
    refresh: bool,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return entry and figures of one experiment: remembered, measured or left."""
    entry: dict[str, Any] = {
        "name": experiment.name, "how": "left", "why": experiment.lacks(bench.devices), "quick": quick, "made": "",
        "age_s": 0.0, "seconds": 0.0, "tries": 0, "drift": 0.0, "noisy": "", "left": {}, "notes": [],
    }  # fmt: skip
    if entry["why"]:
        return entry, []
    held = None if refresh else recall(known, experiment, quick)
    if held is not None:
        return {**entry, **held["entry"], "how": "remembered", "age_s": _age(held["entry"]["made"])}, held[
            "figures"
        ]
    say(f"{experiment.name}: {experiment.summary}, about {seconds_text(bench.policy.seconds)}")
    begun = time.perf_counter()
    try:
        figures = [figure.to_dict() for figure in experiment.run(bench)]
    except RankError as error:
        # A back end that does not work here is no reason to know nothing of the rest.
        return {**entry, "why": error.headline}, []
    for tidy in (gc.collect, torch.cuda.empty_cache):
        tidy()
    entry |= {
        "how": "measured",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - begun,
        "tries": max((reading.tries for reading in bench.readings), default=0),
        "drift": max((reading.drift for reading in bench.readings), default=0.0),
        "noisy": "; ".join(dict.fromkeys(reading.noisy for reading in bench.readings if reading.noisy)),
        "left": {name: why for reading in bench.readings for name, why in reading.left.items()},
        "notes": list(bench.notes),
    }
    keep(known, experiment, quick, entry, figures)
    return entry, figures


def _age(made: str) -> float:
    """Return the seconds since then; a clock that was set back makes nothing younger than now."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(made)).total_seconds())


def _notices(device_set: list[str], cluster: Cluster, entries: list[dict[str, Any]]) -> list[str]:
    """Return lines for the user."""
    lines = list(device_warnings(device_set, cluster))
    for entry in entries:
        if entry["how"] == "left":
            lines.append(f"{entry['name']} was not measured: {entry['why']}")
        if entry["noisy"]:
            lines.append(f"{entry['name']}: this machine was too noisy: {entry['noisy']}")
        if entry["left"]:
            count = counted(len(entry["left"]), "candidate")
            lines.append(f"{entry['name']}: {count} left out: {'; '.join(_reasons(entry['left']))}")
    return lines


def _reasons(left: dict[str, str]) -> list[str]:
    """Return each reason once, with the first that it holds for."""
    first: dict[str, str] = {}
    for name, why in left.items():
        first.setdefault(why, name)
    return [
        f"{why} ({name}{', ...' if list(left.values()).count(why) > 1 else ''})"
        for why, name in first.items()
    ]
