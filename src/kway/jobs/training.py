"""``kway.train``: from a job to a trained module and its record."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.errors import KwayError, UsageError
from kway.job import Job
from kway.jobs.folder import claimed
from kway.jobs.place import Place, place
from kway.records import Plan, Training
from kway.registry import unknown
from kway.step.build import build, load_tensors
from kway.step.precision import cast, precision_of
from kway.step.storage import read_tensors
from kway.strategies.layout import check_model
from kway.strategies.levels import DEFAULT_SHARDS
from kway.training.loop import Loop, training_parts
from kway.training.spec import TrainSpec, interval
from kway.training.validation import BEST, known_figure

Callback = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """A finished training run. ``model`` is the trained module, in this process; ``folder`` where files went.

    ``ema``: with ``Job.ema``, the moving average as a state dict of the model on the CPU, buffers as they are.
    """

    plan: Plan
    record: Training
    model: nn.Module
    folder: Path | None
    ema: dict[str, torch.Tensor] | None = None

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """What each epoch gave: see ``kway.records.Training``."""
        return self.record.epochs


def train(
    job: Job,
    *,
    devices: Any = "auto",
    strategy: str = "auto",
    exactness: str = "math",
    shards: int = DEFAULT_SHARDS,
    epochs: int = 10,
    steps: int | None = None,
    out: Path | str | None = None,
    callbacks: Iterable[Callback] = (),
    validate_every: int | str = 1,
    log_every: int = 10,
    save_best: str | None = None,
    early_stop: str | None = None,
    patience: int = 3,
    echo: bool = True,
    ranks: Any = None,
) -> Run:
    """Train ``job`` and return the run.

    ``devices``: ``"auto"``, a number, ``"cpu:N"`` or ``"cuda:I,J"``. ``strategy``: ``"auto"``, ``"single"``,
    ``"data"`` or with a size, ``"data=2"``. ``exactness``: ``"math"``, ``"bits"`` (equal bits on any number of
    devices up to ``shards``) or ``"loose"``. ``steps`` stops after
    that many optimizer steps. ``out``: a folder for train.json, curves.png, weights.safetensors and logs;
    ``None`` keeps nothing on disk. ``validate_every``: epochs, or like ``"200steps"``. ``save_best``: a
    validation figure whose best weights are kept: ``"validation_loss"``, the name of a metric, or ``METRIC/KEY``
    of one that returns a dict. ``early_stop``: the figure that ends the run when it was not better in
    ``patience`` validations in a row; the weights stay those of the last step. Figures that end in ``loss`` are
    best when small.

    ``callbacks`` are called as ``(event, record)`` in the calling process, whatever the number of devices:
    ``start``, ``step`` (every ``log_every`` steps), ``validation``, ``epoch``, ``end``. ``echo``: whether what
    ranks print is shown. ``ranks``: CPU ranks that are already started.

    Raises ``UsageError`` before anything starts or is written; ``NonFiniteError``; ``RankError`` where a rank
    fails; inside one device, what the user's code raises.
    """
    where = place(devices, strategy, exactness, shards)
    spec = TrainSpec(
        job=job,
        plan=where.plan,
        folder="",
        epochs=epochs,
        steps=steps,
        validate_every=interval("validate_every", validate_every),
        log_every=log_every,
        save_best=_figure(job, "save_best", save_best),
        early_stop=_figure(job, "early_stop", early_stop),
        patience=patience,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    parts, _ = training_parts(job)
    model = build(job)
    check_model(job, model, where.plan.layout, exactness, parts.order.batch_size, shards)
    listeners = list(callbacks)

    def tell(event: dict[str, Any]) -> None:
        name = event["event"]
        for listener in listeners:
            listener(name, {key: value for key, value in event.items() if key != "event"})

    with ExitStack() as stack:
        folder = _folder(stack, where, out)
        # An instance has been initialised here, and travels as it is: init must not run again on every rank.
        sent = replace(job, model=model, init=None) if isinstance(job.model, nn.Module) else job
        spec = replace(spec, job=sent, folder=str(folder))
        logs = folder / "logs" if out is not None and where.starts_ranks else None
        if where.starts_ranks:
            results = where.run(run_rank, spec, on_event=tell, logs=_made(logs), echo=echo, ranks=ranks)
        else:
            results = where.run(run_rank, spec, model, on_event=tell, ranks=ranks)
        record: Training
        record, average = results[0]
        record = replace(record, notices=[*where.notices, *record.notices])
        if out is not None and where.is_main:
            from kway.report.curves import draw

            record.save(folder)
            draw(record, folder / "curves.png")
        if where.starts_ranks:
            model = cast(model, precision_of(job.precision).floating)
            load_tensors(model, read_tensors(folder / "weights.safetensors"), "of the run")
            average = read_tensors(folder / "ema.safetensors") if job.ema is not None else None
    return Run(where.plan, record, model, Path(folder) if out is not None else None, average)


def run_rank(
    context: Any, spec: TrainSpec, model: nn.Module | None = None
) -> tuple[Training, dict[str, torch.Tensor] | None]:
    """Train on one rank; return the record, and the average of the weights to a process that handed in a model.

    The task that ``train`` sends. Processes that start ranks read the average from its file.
    """
    loop = Loop(context.world, spec, build(spec.job) if model is None else model, context.emit)
    return loop.run(), None if model is None else loop.average


def _made(folder: Path | None) -> Path | None:
    if folder is not None:
        folder.mkdir(exist_ok=True)
    return folder


def _figure(job: Job, what: str, name: str | None) -> str | None:
    """Return the name of a validation figure that a decision waits for. Raises ``UsageError``."""
    if name is None:
        return None
    if job.validation is None:
        raise UsageError(f"{what}={name!r} without validation data", f"{what} is judged on validation data")
    if not known_figure(name, job.metrics):
        raise unknown("validation figure", name, ["validation_loss", *job.metrics])
    return name


def _folder(stack: ExitStack, where: Place, out: Path | str | None) -> Path:
    """Claim the folder once for all ranks: rank 0 does, and all learn how it went."""
    files = ("train.json", ("weights.safetensors", "ema.safetensors", BEST, "curves.png"))
    if where.joined is None:
        return stack.enter_context(claimed(out, *files))
    from kway.comm.group import Group

    group = Group(where.joined.rank, where.joined.size)
    outcome: tuple[str, KwayError | None] = ("", None)
    if where.joined.is_main:
        try:
            outcome = str(stack.enter_context(claimed(out, *files))), None
        except KwayError as problem:
            outcome = "", problem
    name, refused = group.objects(outcome)[0]
    if refused is not None:
        raise refused
    return Path(name)
