"""``kway.profile``: what a model costs on one device, for whoever wants to know what several would take."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.devices import busy, cpu
from kway.devices.compilers import missing
from kway.devices.select import parse, spelled
from kway.devices.select import warnings as device_warnings
from kway.devices.topology import discover
from kway.errors import UsageError
from kway.job import Job
from kway.jobs.alone import refuse_among_ranks
from kway.jobs.arguments import check_job
from kway.jobs.folder import claimed
from kway.jobs.identity import identity_of
from kway.jobs.place import choose, rank_threads
from kway.launch.one_run import alone
from kway.profiling.run import Profiler, Wanted
from kway.step.build import build
from kway.step.kinds import DEFAULT_KIND, KINDS, check_kind
from kway.step.seeds import preserved_everywhere
from kway.strategies.layout import AUTO, check_model
from kway.strategies.levels import DEFAULT_SHARDS
from kway.training.own_data import on_own_data
from kway.training.parts import training_parts
from kway.training.surroundings import gpu_name, machine, versions
from kway.units import shown
from kway.workload import Workload

# What a profile takes, about, where nobody says.
USUAL_S = 20.0
MOST_S = 86_400
NOT_ASKED = "not asked for"


@alone
def profile(
    job: Job,
    *,
    devices: Any = "auto",
    exactness: str = "math",
    shards: int = DEFAULT_SHARDS,
    step_kind: str | Iterable[str] = AUTO,
    settings: Mapping[str, Any] | None = None,
    seconds: float = USUAL_S,
    out: Path | str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Workload:
    """Measure what the steps of ``job`` cost on one device; return the record.

    The job stays as it is: samples are read from a copy of its data set, which may draw or count by itself, or be a
    stream that can be read once.

    ``devices``: the set to prepare for: one of them computes, over the shares that 1 to all of them would have;
    ``auto``: all GPUs, else as many CPU ranks as there are processors.
    ``step_kind``: one or several; ``auto``: eager on a CPU, all on a GPU. ``seconds``: about how long it may take;
    large models and compilers take longer. ``out``: a folder for workload.json. ``say`` is told what
    goes on. The rest as for ``kway.train``. Raises ``UsageError`` before anything is measured, also for data that
    cannot be copied.
    """
    begun = time.perf_counter()
    check_job(job)
    if not callable(say):
        raise UsageError(f"say={shown(say)}", "it must be a function that takes a line")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < MOST_S:
        raise UsageError(f"seconds={shown(seconds)}", f"it must be a number greater than 0, below {MOST_S:,}")
    cluster, spec = discover(), spelled(devices)
    device_set = parse(spec, cluster)
    if spec == AUTO and device_set[0] == "cpu":
        # Of one that is not named, all that it may be used as.
        device_set = ["cpu"] * cluster.cpu["usable"]
    refuse_among_ranks(
        "kway.profile", "it measures one device, without others beside it", "start one process"
    )
    device = device_set[0]
    kinds, left = _kinds(step_kind, device)
    plan = choose([device], "single", exactness, shards, DEFAULT_KIND, settings)
    with ExitStack() as stack:
        folder = None if out is None else stack.enter_context(claimed(out, "workload.json"))
        stack.enter_context(preserved_everywhere())
        if device != "cpu":
            stack.enter_context(torch.cuda.device(torch.device(device)))
        model = build(job)
        check_model(
            job, model, {}, exactness, training_parts(replace(job, validation=None))[0].order.batch_size
        )
        job = on_own_data(job)
        wanted = Wanted(
            device, len(device_set), kinds, seconds, lambda count: rank_threads(device_set[:count])
        )
        others = busy.taken(cluster.cpu["usable"])
        waits = busy.said(others)
        for line in waits:
            say(line)
        modes, identity = _modes(model), identity_of(model)
        try:
            found = Profiler(job, model, plan, wanted, say).run()
        finally:
            for module, training in modes:
                module.training = training
        place = torch.device(device)
        record = Workload(
            model=job.title,
            device=device,
            device_name=gpu_name(place) or cpu.model(),
            machine=machine([gpu_name(place)], threads=rank_threads([device])),
            versions=versions(),
            precision=job.precision,
            level=exactness,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            batch_size=found.batch_size,
            samples=found.samples,
            step_kinds_left={**left, **found.left},
            seconds=time.perf_counter() - begun,
            busy=others,
            identity=identity,
            notices=list(dict.fromkeys([*device_warnings(device_set, cluster), *waits, *found.notices])),
            **found.fields,
        )
        if folder is not None:
            record.save(Path(folder))
    return record


def _kinds(step_kind: str | Iterable[str], device: str) -> tuple[list[str], dict[str, str]]:
    """Return the step kinds to time, and why others are left. Raises ``UsageError`` and ``RefusedError``."""
    on_gpu = device != "cpu"
    if step_kind == AUTO:
        asked = [kind.name for kind in KINDS.values() if on_gpu or kind.name == DEFAULT_KIND]
    else:
        given = step_kind.split(",") if isinstance(step_kind, str) else list(step_kind)
        asked = list(dict.fromkeys(check_kind(str(name).strip(), [device]).name for name in given))
    lack = missing(torch.device(device).type)
    left = {name: lack for name in asked if KINDS[name].compiles and lack is not None}
    # Layers and parts of a step are those of eager ones, whatever else is asked for.
    kinds = [DEFAULT_KIND, *(name for name in asked if name != DEFAULT_KIND and name not in left)]
    for kind in KINDS.values():
        if kind.name not in kinds and kind.name not in left:
            unfit = kind.needs is not None and not on_gpu
            left[kind.name] = "it needs a CUDA device" if unfit else NOT_ASKED
    return kinds, left


def _modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(module, module.training) for module in model.modules()]
