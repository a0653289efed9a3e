"""``kway.plan``: every layout on every number of devices, priced, ranked and explained; checked by runs if wanted."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kway.devices.select import parse_list, spelled
from kway.devices.topology import discover
from kway.errors import RefusedError, UsageError
from kway.job import Job
from kway.jobs.alone import refuse_among_ranks
from kway.jobs.arguments import check_given, truth
from kway.jobs.asked import AUTO, Asked, measurements_given, workloads_given
from kway.jobs.folder import claimed
from kway.jobs.known_costs import Known, gather
from kway.planned import Planned
from kway.planning import history
from kway.planning.candidates import Candidate, device_sets
from kway.planning.order import judged
from kway.planning.price import Room, Scaling
from kway.planning.priced import pricer
from kway.planning.search import Found, search
from kway.records import Cluster
from kway.step.build import build
from kway.step.kinds import DEFAULT_KIND, kind_of
from kway.strategies.layout import check_model, one_process
from kway.strategies.levels import DEFAULT_SHARDS
from kway.training.parts import training_parts
from kway.training.surroundings import machine, versions
from kway.units import shown

# Files that a plan writes beside its record.
PICTURES = ("speedup.png", "terms.png")


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
    candidate as ``kway.train`` does, in turns, and compare; the errors are kept for later plans to show.
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
    asked = asked_of(job, devices, strategy, exactness, shards, step_kind, batch_size_per_device, cluster)
    with ExitStack() as stack:
        folder = stack.enter_context(claimed(out, "plan.json", PICTURES)) if out is not None else None
        if there is not None:
            known = known_elsewhere(asked, there, workload, refresh, say)
        else:
            given = measurements_given(measurements)
            known = gather(asked, workloads_given(workload), given, ranks, say, refresh)
        record = planned(asked, known, begun, estimate_only=on is not None)
        if check:
            record = checked(asked, record, ranks, say, begun)
        if folder is not None:
            record.save(folder)
    return record


def asked_of(
    job: Job,
    devices: Any,
    strategy: Any,
    exactness: str,
    shards: int,
    step_kind: Any,
    batch_size_per_device: int | None = None,
    cluster: Cluster | None = None,
) -> Asked:
    """Return what is to be planned. Raises ``UsageError`` for what cannot be; nothing is started."""
    cluster = discover() if cluster is None else cluster
    refuse_among_ranks("a plan", "their number is chosen already", "plan in one process")
    kinds = _names("step_kind", step_kind)
    for name in kinds or ():
        kind_of(name)
    sets = _sets(devices, cluster)
    if batch_size_per_device is not None:
        job = replace(job, batch_size=_positive(batch_size_per_device))
    parts, _ = training_parts(replace(job, validation=None))
    model = build(job)
    scaling = Scaling(parts.order.batch_size, batch_size_per_device is not None)

    node_of = {f"cuda:{gpu['index']}": gpu.get("node", 0) for gpu in cluster.gpus}

    def refused(layout: Mapping[str, int], devices: Sequence[str]) -> str:
        if one_process(layout) and len({node_of.get(device, 0) for device in devices}) > 1:
            return "its ranks are threads of one process, and these devices are of several machines"
        try:
            check_model(job, model, layout, exactness, scaling.of(len(devices)), shards)
        except RefusedError as error:
            return str(error)
        return ""

    asked = Asked(
        job,
        cluster,
        sets,
        _names("strategy", strategy),
        kinds,
        exactness,
        shards,
        scaling,
        refused,
        devices != AUTO,
    )
    # What cannot be is said before anything is timed.
    found, left = asked.candidates(lambda device: kinds or [DEFAULT_KIND])
    if not found:
        raise UsageError(f"no plan for {job.title}", left[0].why if left else "there is no layout")
    return asked


def _sets(devices: Any, cluster: Cluster) -> list[list[str]]:
    """Return device sets: all of a machine, those that a user names, or those that are sets already."""
    if isinstance(devices, list) and devices and all(isinstance(each, list) for each in devices):
        return devices
    spec = spelled(devices)
    return device_sets(cluster) if spec == AUTO else parse_list(spec, cluster)


def _names(what: str, given: Any) -> list[str] | None:
    """Return names from a list or a text with commas, ``None`` for ``auto``. Raises ``UsageError``."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    if not isinstance(given, Sequence) or not given or not all(isinstance(name, str) for name in given):
        raise UsageError(f"{what}={shown(given)}", "it must be auto, or names in a list or by commas")
    return None if AUTO in given else list(dict.fromkeys(given))


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"batch_size_per_device={shown(value)}", "it must be a whole number of at least 1")
    return value


def planned(asked: Asked, known: Known, begun: float, estimate_only: bool = False) -> Planned:
    """Return the record of what is asked for, from what is known. Raises ``UsageError`` where nothing fits.

    ``estimate_only``: for a machine that is not here, of which no check was ever made.
    """
    found, left = asked.candidates(lambda device: known.step_kinds(device, asked.step_kinds))
    ranked = _ranked(asked, known, found)
    facts = history.facts_of(asked.cluster)
    return Planned(
        model=asked.job.title,
        precision=asked.job.precision,
        level=asked.level,
        shards=asked.shards,
        scaling=asked.scaling.name,
        batch_size=asked.scaling.batch,
        candidates=ranked.rows,
        chosen=ranked.chosen,
        left=[each.to_dict() for each in [*left, *ranked.left]] + known.kinds_left(asked.step_kinds),
        serial_fraction=ranked.serial_fraction,
        amdahl_bound=ranked.amdahl_bound,
        history=history.summary([] if estimate_only else history.recall(facts)),
        workloads=[
            {"device": each.device, "device_name": each.device_name, "made": each.made}
            for each in known.workloads.values()
        ],
        measurements=[
            {"device": kind, "made": each.made, "age_s": each.age_s}
            for kind, each in known.measurements.items()
        ],
        machine=_machine(asked, estimate_only),
        versions=versions(),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - begun,
        notices=list(known.notices),
        estimate_only=estimate_only,
    )


def _machine(asked: Asked, estimate_only: bool) -> dict[str, Any]:
    """Return what the record says of the machine."""
    gpus = sorted({gpu["name"] for gpu in asked.cluster.gpus}) if "cuda" in asked.device_types else []
    if estimate_only:
        return {"cpu": asked.cluster.cpu["model"], "usable": asked.cluster.cpu["usable"], "gpus": gpus}
    return machine(gpus)


def _ranked(asked: Asked, known: Known, found: Sequence[Candidate]) -> Found:
    flops = [each.flop_per_sample for each in known.workloads.values()]
    return search(
        found,
        pricer(known.workloads, known.measurements, asked.shards),
        room_of(asked.cluster),
        asked.scaling,
        int(asked.cluster.cpu["usable"]),
        next((flop for flop in flops if flop is not None), None),
        asked.job.title,
    )


def room_of(cluster: Cluster) -> Room:
    """Return what says how many bytes each device of a candidate has: what is free now, CPU ranks share it."""
    free = {f"cuda:{gpu['index']}": gpu["memory_free"] for gpu in cluster.gpus}

    def room(candidate: Candidate) -> int | None:
        if candidate.device_type == "cpu":
            return int(cluster.cpu["memory_available"]) // candidate.devices
        sizes = [free.get(device) for device in candidate.device_set]
        known = [size for size in sizes if size is not None]
        return min(known) if len(known) == len(sizes) else None

    return room


def checked(asked: Asked, record: Planned, ranks: Any, say: Callable[[str], None], begun: float) -> Planned:
    """Return the record with what runs of its candidates measured; their errors are kept for later plans."""
    # Imported here: it starts runs, and those may ask for a plan.
    from kway.jobs.checking import check

    job = asked.job
    lines = check(job, record.candidates, asked.level, asked.shards, say, ranks)
    measured = [row for row in record.candidates if row.get("measured_step_s")]
    made = datetime.now(UTC).isoformat(timespec="seconds")
    facts = history.facts_of(asked.cluster)
    history.keep(facts, [history.entry(row, record.model, made) for row in measured])
    return replace(
        record,
        check=judged(measured),
        history=history.summary(history.recall(facts)),
        seconds=time.perf_counter() - begun,
        notices=[*record.notices, *lines],
    )
