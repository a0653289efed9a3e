"""``kway.measure``: what this machine does in how long, measured now or remembered."""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import torch

from kway.devices import busy
from kway.devices.cpu import threads_for
from kway.devices.select import parse, spelled
from kway.devices.select import warnings as device_warnings
from kway.devices.topology import discover
from kway.errors import RankError
from kway.jobs.alone import refuse_among_ranks
from kway.jobs.kept_ranks import KeptRanks
from kway.jobs.place import with_threads
from kway.measurements import Measurements, beside_others
from kway.measuring.bench import Bench
from kway.measuring.budget import allowed, expected
from kway.measuring.experiment import Experiment, chosen
from kway.measuring.kept import facts, keep, recall
from kway.measuring.limits import limits_of
from kway.measuring.reference import reference
from kway.measuring.timer import Policy, noisy
from kway.records import Cluster
from kway.step.seeds import preserved_everywhere
from kway.training.surroundings import machine, versions
from kway.units import counted, seconds_text

# More CPU ranks than these say nothing new of one machine.
MOST_CPU_RANKS = 8
QUICK = Policy(rounds=7)
# Of a minute, drawing pictures takes the rest.
QUICK_S = 52.0
# What loading torch takes, where nobody says when the minute began.
LOADED_S = 5.0
FULL = Policy(rounds=15, sample_s=5e-3)
_WORTH_SAYING_S = 1.0


def measure(
    *,
    devices: Any = "auto",
    only: Any = None,
    quick: bool = False,
    refresh: bool = False,
    ranks: Any = None,
    since: float | None = None,
    seconds: float = QUICK_S,
    say: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """Measure this machine, or recall what was measured under the same hardware, driver and torch; return the record.

    ``devices``: the device set to measure, the CPU always with it. ``only``: names of experiments, in a list or by
    commas. ``quick``: a few sizes, in a minute in place of several; full figures that are remembered count as well.
    ``refresh``: measure also what is remembered. ``ranks``: CPU ranks that are already started. A quick
    measurement ends about ``seconds`` after ``since`` (of ``time.perf_counter()``; before torch was loaded). ``say`` is
    told what goes on. Raises ``UsageError`` before anything is measured.
    """
    begun = time.perf_counter()
    ends = (begun - LOADED_S if since is None else since) + seconds
    experiments = chosen(only)
    cluster, spec = discover(), spelled(devices)
    device_set = parse(spec, cluster)
    refuse_among_ranks(
        "measure", "they would measure each other; it starts ranks of its own", "call it in one process"
    )
    there = ("cpu", *dict.fromkeys(device for device in device_set if device != "cpu"))
    given = len(device_set) if device_set[0] == "cpu" and spec != "auto" else cluster.cpu["usable"]
    cpu_ranks = min(given, MOST_CPU_RANKS)
    threads = threads_for(1)
    known = facts(cluster, there, cpu_ranks, threads)
    held = {} if refresh else {each.name: recall(known, each, quick) for each in experiments}
    todo = [each for each in experiments if not held.get(each.name) and not each.lacks(there)]
    benches: dict[str, Bench] = {}
    entries, figures = [], []
    others = busy.taken(cluster.cpu["usable"]) if todo else ""
    with with_threads(threads), preserved_everywhere(), KeptRanks(ranks) as on_ranks:
        limits = limits_of(cluster, there)
        for experiment in todo:
            benches[experiment.name] = Bench(
                experiment.name, there, experiment.sizes(quick), QUICK if quick else FULL, limits=limits,
                alike=alike(cluster, there) if quick else {}, cpu_ranks=cpu_ranks, on_ranks=on_ranks,
            )  # fmt: skip
        _start(todo, benches, say)
        for experiment in experiments:
            if experiment not in todo:
                entry, found = _known(experiment, there, quick, held.get(experiment.name))
            else:
                bench = benches[experiment.name]
                planned = [each.budget(quick, len(bench.gpus)) for each in todo[todo.index(experiment) :]]
                budget = allowed(planned, ends - time.perf_counter()) if quick else planned[0]
                bench.spend(budget)
                say(
                    f"{experiment.name}: {experiment.summary}, about {seconds_text(expected(planned[0], budget))}"
                )
                entry, found = _measured(experiment, bench, quick)
                entry["busy"] = others
                if entry["made"]:
                    keep(known, experiment, quick, entry, found)
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
        notices=[*busy.said(others), *_notices(device_set, cluster, entries)],
    )


def _names(cluster: Cluster, devices: tuple[str, ...]) -> list[str]:
    return [gpu["name"] for gpu in cluster.gpus if f"cuda:{gpu['index']}" in devices]


def alike(cluster: Cluster, devices: Sequence[str]) -> dict[str, str]:
    """Return the first GPU of its kind by each further one of that kind."""
    kinds = {f"cuda:{gpu['index']}": (gpu["name"], gpu["memory_total"]) for gpu in cluster.gpus}
    first: dict[Any, str] = {}
    found = {}
    for device in devices:
        if device in kinds and first.setdefault(kinds[device], device) != device:
            found[device] = first[kinds[device]]
    return found


def _start(todo: Sequence[Experiment], benches: dict[str, Bench], say: Callable[[str], None]) -> None:
    """Start what the experiments work with, all of it at once, before the first one measures."""
    begun = time.perf_counter()
    waits = [experiment.start(benches[experiment.name]) for experiment in todo]
    for gpu in {
        gpu for experiment in todo for gpu in benches[experiment.name].gpus if experiment.quick_s.gpu
    }:
        reference(gpu)(1)  # loads its libraries
    for wait in waits:
        # A back end that does not work here is said by the experiment that needs it.
        with suppress(RankError):
            wait()
    took = time.perf_counter() - begun
    if took > _WORTH_SAYING_S:
        say(f"started: what the experiments work with, in {seconds_text(took)}")


def _entry(experiment: Experiment, quick: bool) -> dict[str, Any]:
    return {
        "name": experiment.name, "how": "left", "why": "", "quick": quick, "made": "", "age_s": 0.0,
        "seconds": 0.0, "tries": 0, "drift": 0.0, "noisy": "", "left": {}, "notes": [], "busy": "",
    }  # fmt: skip


def _known(
    experiment: Experiment, devices: Sequence[str], quick: bool, held: dict[str, Any] | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return entry and figures of an experiment that is remembered, or cannot be done here."""
    entry = _entry(experiment, quick)
    lacks = experiment.lacks(devices)
    if lacks or held is None:
        return entry | {"why": lacks}, []
    return {**entry, **held["entry"], "how": "remembered", "age_s": _age(held["entry"]["made"])}, held[
        "figures"
    ]


def _measured(
    experiment: Experiment, bench: Bench, quick: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return entry and figures of an experiment, measured now; no figures where a rank fails."""
    entry = _entry(experiment, quick)
    begun = time.perf_counter()
    try:
        figures = [figure.to_dict() for figure in experiment.run(bench)]
    except RankError as error:
        # A back end that does not work here is no reason to know nothing of the rest.
        return entry | {"why": error.headline, "notes": [*bench.notes, *filter(None, [error.traceback])]}, []
    for tidy in (gc.collect, torch.cuda.empty_cache):
        tidy()
    readings = bench.readings
    return entry | {
        "how": "measured",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - begun,
        "tries": max((reading.tries for reading in readings), default=0),
        "drift": max((reading.drift for reading in readings), default=0.0),
        "noisy": noisy(readings),
        "left": {name: why for reading in readings for name, why in reading.left.items()},
        "notes": list(bench.notes),
    }, figures


def _age(made: str) -> float:
    """Return the seconds since then; a clock that was set back makes nothing younger than now."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(made)).total_seconds())


def _notices(device_set: list[str], cluster: Cluster, entries: list[dict[str, Any]]) -> list[str]:
    """Return lines for the user."""
    lines = list(device_warnings(device_set, cluster))
    lines += [
        f"{', '.join(names)}: measured while other programs kept {others} busy: --refresh, in Python refresh=True, "
        "measures anew"
        for names, others, _ in beside_others(entry for entry in entries if entry["how"] == "remembered")
    ]
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
