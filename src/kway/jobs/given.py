"""Records that a user gives for a plan: read, and held against what is asked for now."""

from pathlib import Path
from typing import Any

from torch import nn

from kway.errors import UsageError
from kway.jobs.asked import Asked
from kway.jobs.identity import differs
from kway.measurements import Measurements
from kway.planned import device_type
from kway.profiling.optimizer_text import optimizer_text
from kway.profiling.run import copied_for_steps
from kway.step.build import build, make_optimizer
from kway.workload import Workload

# What a driver says where it does not know.
_NAMELESS = ("", "unknown")


def measurements_given(given: Any) -> Measurements | None:
    """Return measurements from a record or a file, ``None`` where none is given. Raises ``UsageError``."""
    found: Measurements | None = None if given is None else _loaded("measurements", given, Measurements)
    return found


def workloads_given(given: Any, asked: Asked) -> dict[str, Workload]:
    """Return workloads by type of device, from records, files, or a list of them.

    Raises ``UsageError`` where one is of another model, optimizer, batch, precision, level or device than is asked for
    now, with all that differs, and where two are of one type of device.
    """
    every = given if isinstance(given, list | tuple) else [] if given is None else [given]
    found: dict[str, Workload] = {}
    for each in every:
        workload: Workload = _loaded("workload", each, Workload)
        _hold(workload, asked)
        kind = device_type(workload.device)
        if kind in found:
            raise UsageError(
                f"two workloads of {'CPU ranks' if kind == 'cpu' else 'GPUs'}",
                "a plan rests on one for each type of device",
                "leave one out",
            )
        found[kind] = workload
    return found


def _loaded(what: str, given: Any, kind: Any) -> Any:
    if isinstance(given, kind):
        return given
    if not isinstance(given, str | Path):
        raise UsageError(
            f"{what} is of type {type(given).__name__}",
            f"it must be a {kind.__name__}, or the path of its file",
        )
    return kind.load(Path(given))


def _hold(workload: Workload, asked: Asked) -> None:
    """Raise ``UsageError`` for a workload of something else."""
    job = asked.job
    batches = _batches(asked)
    # Older records hold how many parameters there are, and nothing else of the model.
    then = workload.identity or {"parameters": workload.parameters["count"]}
    unlike = differs(job.title, then, workload.versions, asked.identity)
    model = (workload.model, job.title) if unlike is None or workload.model != job.title else unlike
    pairs = [
        ("model", *model),
        ("precision", workload.precision, job.precision),
        ("level", workload.level, asked.level),
        ("batch", f"{workload.batch_size:,}", " or ".join(f"{batch:,}" for batch in batches)),
        ("device", *_devices(workload, asked)),
    ]
    if workload.batch_size in batches:
        pairs = [pair for pair in pairs if pair[0] != "batch"]
    differ = [pair for pair in pairs if pair[1] != pair[2]]
    if not any(what == "model" for what, *_ in differ):
        # Of another model the optimizer is nobody's concern.
        optimizer = _optimizer(asked)
        differ += [("optimizer", workload.optimizer, optimizer)] if workload.optimizer != optimizer else []
    if differ:
        raise UsageError(
            f"a workload of {', '.join(f'{what} {got}' for what, got, _ in differ)}",
            f"the job has {', '.join(need for *_, need in differ)}",
            "profile it as it is now (kway profile), or leave the workload out (--workload)",
        )


def _batches(asked: Asked) -> list[int]:
    """Return the batches that a workload may be of: one; with a batch for each device that of some devices."""
    scaling = asked.scaling
    most = max(2, *(len(devices) for devices in asked.sets)) if scaling.weak else 1
    return list(dict.fromkeys(scaling.of(count) for count in range(1, most + 1)))


def _devices(workload: Workload, asked: Asked) -> tuple[str, str]:
    """Return which device a workload is of, and which are asked for, in words: the same where it is one of these."""
    kind = device_type(workload.device)
    cluster = asked.cluster
    if kind not in asked.device_types:
        return workload.device, ", ".join(asked.device_types)
    names = [cluster.cpu["model"]] if kind == "cpu" else [gpu["name"] for gpu in cluster.gpus]
    # Drivers and torch add to each other's names.
    own = workload.device_name
    alike = any(name in _NAMELESS or name.startswith(own) or own.startswith(name) for name in names)
    return (own, own) if alike else (own, ", ".join(dict.fromkeys(names)))


def _optimizer(asked: Asked) -> str:
    """Say which optimizer the job has. It is made over a model of its own: the user's stays as it is."""
    job = asked.job
    model = build(job)
    own = copied_for_steps(model, job)[0] if isinstance(job.model, nn.Module) else model
    return optimizer_text(make_optimizer(job, own))
