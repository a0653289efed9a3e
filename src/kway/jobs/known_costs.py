"""What a plan rests on: the job's workload on each type of device, and measurements of the machine; from records,
from the cache, or taken now.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kway.devices.remembered import digest, read, write
from kway.errors import UsageError
from kway.job import Job
from kway.jobs.asked import Asked
from kway.jobs.measuring import QUICK_S, measure
from kway.jobs.profiling import NOT_ASKED, USUAL_S, profile
from kway.measurements import Measurements
from kway.planned import spelled_set
from kway.planning import doubts
from kway.step.build import build
from kway.step.kinds import DEFAULT_KIND, KINDS
from kway.strategies.layout import AUTO
from kway.training.parts import training_parts
from kway.tuning.kept import job_facts
from kway.units import seconds_text
from kway.workload import Workload

# The experiments that prices of several devices are made of, by type of device. What threads of one CPU hand each other
# is measured as they do it, and needs no copies.
EXPERIMENTS = {
    "cpu": ("collectives", "overlap", "beside"),
    "cuda": ("copies", "collectives", "overlap", "beside"),
}
# Operations a second of a CPU core that few reach, and how many times as long as one GPU's step CPU ranks may take at
# that rate: beyond, they win on no account, and to profile them would take minutes.
CORE_FLOPS_S, FAR_BEHIND = 1e11, 3.0
# Of a short time, what is for the model where the machine has to be measured too: to start ranks takes the most.
PROFILE_PART = 0.2
# What opening a model and counting its operations take beside the seconds that are for timing, for what users are told.
AROUND_S = 2.0


@dataclass(frozen=True)
class Known:
    """``workloads`` and ``measurements`` by type of device; the latter only where there are several devices.

    ``unknown``: why nothing is known of a type. ``given``: the types whose workload was handed in.
    """

    workloads: Mapping[str, Workload]
    measurements: Mapping[str, Measurements]
    notices: Sequence[str] = field(default=())
    unknown: Mapping[str, str] = field(default_factory=dict)
    given: Collection[str] = ()

    def step_kinds(self, device_type: str, named: Sequence[str] | None) -> list[str]:
        """Return the step kinds that were timed on a type of device, of those that are ``named``."""
        timed = self.workloads[device_type].step_kinds() if device_type in self.workloads else []
        return [kind for kind in timed if named is None or kind in named]

    def kinds_left(self, named: Sequence[str] | None) -> list[dict[str, Any]]:
        """Return rows of a plan's ``left`` for what was not timed: step kinds, and whole types of device."""
        rows = [
            (each.device, kind, why)
            for each in self.workloads.values()
            for kind, why in each.step_kinds_left.items()
            if named is None or kind in named
        ]
        rows += [(device, "any", why) for device, why in self.unknown.items()]
        return [
            {"strategy": "any", "devices": 0, "device_set": [device], "step_kind": kind, "why": why}
            for device, kind, why in rows
        ]


def gather(
    asked: Asked,
    given: Mapping[str, Workload],
    measurements: Measurements | None,
    ranks: Any,
    say: Callable[[str], None],
    refresh: bool = False,
    seconds: float | None = None,
) -> Known:
    """Return what prices are made of. What is ``given`` (workloads by type of device), or was found out before, is not
    found out again.

    ``refresh``: what was found out before counts for nothing. ``seconds``: what all of it may take, about; ``None``:
    as long as a profile and a quick measurement take. Raises ``UsageError`` where it cannot be found out.
    """
    begun = time.perf_counter()
    several = any(asked.counts(kind)[-1] > 1 for kind in asked.device_types)
    machine_too = several and measurements is None
    part = None if seconds is None else seconds * (PROFILE_PART if machine_too else 1.0)
    found: dict[str, Workload] = {}
    unknown: dict[str, str] = {}
    # GPUs first: what they take says whether CPU ranks are worth a look.
    for kind in sorted(asked.device_types, reverse=True):
        why = "" if kind in given else _hopeless(asked, kind, found.get("cuda"))
        if why:
            unknown[kind] = why
        else:
            found[kind] = given[kind] if kind in given else profiled(asked, kind, say, refresh, part)
    of: dict[str, Measurements] = {}
    for kind, workload in found.items():
        if asked.counts(kind)[-1] == 1:
            continue
        left = None if seconds is None else max(0.0, seconds - (time.perf_counter() - begun))
        only = needed(kind, workload, short=seconds is not None)
        of[kind] = (
            measured(asked, kind, ranks, say, refresh, left, only) if measurements is None else measurements
        )
    return Known(found, of, _beside_others(found, of, given, measurements is not None), unknown, [*given])


def _beside_others(
    found: Mapping[str, Workload], of: Mapping[str, Measurements], given: Collection[str], measured: bool
) -> list[str]:
    """Return a line on what was found out while other programs kept processors busy, now or whenever it was.

    ``given``: the types whose workload was handed in; ``measured``: whether measurements were.
    """
    moments = [each for kind, held in found.items() for each in doubts.of_profile(held, kind in given)]
    for kind, each in of.items():
        moments += doubts.of_measurements(used(kind, each), measured)
    return doubts.said(moments)


def used(device_type: str, measurements: Measurements) -> list[dict[str, Any]]:
    """Return of measurements the experiments that prices on a type of device are made of."""
    return [entry for entry in measurements.experiments if entry["name"] in EXPERIMENTS[device_type]]


def _hopeless(asked: Asked, device_type: str, on_gpu: Workload | None) -> str:
    """Say why a type of device need not be profiled, or ``""``."""
    if not kinds_for(asked.step_kinds, device_type):
        return f"step kind {', '.join(asked.step_kinds or ())} needs a CUDA device"
    if device_type != "cpu" or on_gpu is None or asked.named or not on_gpu.flop_per_sample:
        return ""
    timed = on_gpu.timed(DEFAULT_KIND)[-1]
    least = on_gpu.flop_per_sample * timed["samples"] / (CORE_FLOPS_S * asked.cluster.cpu["usable"])
    if least < FAR_BEHIND * timed["seconds"]:
        return ""
    return (
        f"not profiled: at {CORE_FLOPS_S / 1e9:.0f} GFLOP/s a core, which few reach, all cores take "
        f"{least / timed['seconds']:.1f} times as long as one GPU (--devices cpu:N looks at it)"
    )


def kinds_for(named: Sequence[str] | None, device_type: str) -> list[str]:
    """Return the step kinds to profile on a type of device: those ``named`` that run there, else the usual ones."""
    if named is None:
        return [DEFAULT_KIND] if device_type == "cpu" else list(KINDS)
    return [name for name in named if KINDS[name].needs in (None, device_type)]


def profiled(
    asked: Asked, device_type: str, say: Callable[[str], None], refresh: bool, seconds: float | None
) -> Workload:
    """Return the workload of the job on a type of device: remembered, or profiled now on one of them.

    One that was profiled in less time than now is wanted counts for nothing.
    """
    most, job = _subject(asked, device_type)
    kinds = kinds_for(asked.step_kinds, device_type)
    known = _facts(asked, job, most)
    wanted = USUAL_S if seconds is None else seconds
    held = None if refresh else _recalled(known, kinds, 0.0 if seconds is not None else wanted)
    if held is not None:
        return held
    say(f"profiling {job.title} on one device ({most[0]}), about {seconds_text(wanted + AROUND_S)}")
    workload = profile(
        job,
        devices=spelled_set(most),
        exactness=asked.level,
        shards=asked.shards,
        step_kind=kinds,
        seconds=wanted,
        say=say,
    )
    write(_place(known), known, seconds=wanted, workload=workload.to_dict())
    return workload


def is_more_known(asked: Asked, device_type: str) -> bool:
    """Whether other step kinds than those asked for are remembered of the job on a type of device."""
    most, job = _subject(asked, device_type)
    kinds = kinds_for(asked.step_kinds, device_type)
    held = _recalled(_facts(asked, job, most), kinds, 0.0)
    return held is not None and not {*held.step_kinds()} <= {*kinds}


def _subject(asked: Asked, device_type: str) -> tuple[list[str], Job]:
    """Return the devices that a workload is for, and the job that is profiled on one of them."""
    most = max((each for each in asked.sets if each[0].startswith(device_type)), key=len)
    job = asked.job
    if asked.scaling.weak and len(most) > 1:
        # So that the share of each device is among those that one of two devices has.
        job = replace(job, batch_size=2 * asked.scaling.batch)
    return most, job


def _facts(asked: Asked, job: Job, device_set: Sequence[str]) -> dict[str, Any]:
    """Return what a workload depends on, plain values."""
    parts = training_parts(replace(job, validation=None))[0]
    return {
        **job_facts(job, build(job), parts, torch.device(device_set[0])),
        "batch_size": parts.order.batch_size,
        "level": [asked.level, asked.shards],
        "device_set": spelled_set(list(device_set)),
        # Raised where numbers of a workload mean something else than before: the second one of peaks.
        "form": [Workload.version, 3],
    }


def _place(known: Mapping[str, Any]) -> Path:
    return Path("profiled") / f"{digest(known)}.json"


def _recalled(known: Mapping[str, Any], kinds: Sequence[str], seconds: float) -> Workload | None:
    """Return a workload that was profiled with these step kinds in as many seconds, or ``None``."""
    held = read(_place(known), known)
    try:
        if held is None or float(held["seconds"]) < seconds:
            return None
        workload = Workload.from_dict(held["workload"])
    except (UsageError, KeyError, TypeError, ValueError, OverflowError):
        return None
    tried = {
        *workload.step_kinds(),
        *(kind for kind, why in workload.step_kinds_left.items() if why != NOT_ASKED),
    }
    return workload if set(kinds) <= tried else None


def needed(device_type: str, workload: Workload, short: bool) -> tuple[str, ...]:
    """Return the experiments that prices are made of. In a ``short`` look only those that this model needs.

    What computing and communicating cost each other matters where gradients are sent beside backward: in one bucket
    they are not, and what CPU ranks cost each other is measured apart from it.
    """
    every = EXPERIMENTS[device_type]
    is_seen = short and device_type == "cpu" and len(workload.buckets) == 1
    return tuple(name for name in every if name != "overlap" or not is_seen)


def measured(
    asked: Asked,
    device_type: str,
    ranks: Any,
    say: Callable[[str], None],
    refresh: bool,
    seconds: float | None,
    only: Sequence[str],
) -> Measurements:
    """Return measurements of the devices of a type by ``only`` these experiments: remembered, or quick ones taken now.

    As ``kway measure`` takes them where nobody names devices, so that those are the ones that are remembered.
    """
    cores = int(asked.cluster.cpu["usable"])
    named = AUTO if device_type == "cuda" else f"cpu:{max(cores, *asked.counts('cpu'))}"
    devices = AUTO if not asked.cluster.gpus and named == f"cpu:{cores}" else named
    return measure(
        devices=devices,
        only=only,
        quick=True,
        refresh=refresh,
        ranks=ranks,
        since=time.perf_counter(),
        seconds=QUICK_S if seconds is None else min(seconds, QUICK_S),
        say=say,
    )
