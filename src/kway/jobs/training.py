"""``kway.train``: from a job to a trained module and its record."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.errors import UsageError
from kway.job import Job
from kway.jobs import threads
from kway.jobs.adapting import adapting_of
from kway.jobs.alike import check_alike
from kway.jobs.arguments import check_given
from kway.jobs.automatic import Going, foreseen
from kway.jobs.decisions import figure_of, patience_of
from kway.jobs.folder import claimed, is_there, logs_of
from kway.jobs.keeping import kept
from kway.jobs.leaving import says_that_nothing_is_there, says_what_is_there, what_is_there
from kway.jobs.listeners import Callback, followed, listeners
from kway.jobs.own_code import facts_with_code
from kway.jobs.place import Place, on_main
from kway.jobs.restarting import Restarts, run_again
from kway.jobs.resuming import check_saving, check_schedule, find, optimizer_of, saves_none
from kway.jobs.too_short import check_length_for
from kway.jobs.tuning import STARTED_AGAIN, as_run, in_the_way_chosen, wish_of
from kway.launch.interrupt import asked_to_stop
from kway.launch.one_run import alone
from kway.records import Plan, Training
from kway.report.lines import last_figures
from kway.step.build import build, load_weights, made_before
from kway.step.hooked_losses import loss_beside
from kway.step.precision import cast, precision_of
from kway.step.storage import read_tensors
from kway.strategies.layout import AUTO, check_model
from kway.strategies.levels import DEFAULT_SHARDS
from kway.trackers.chosen import EVENTS
from kway.trackers.protocol import Tracker
from kway.training.facts import check_length
from kway.training.growing import growth_of
from kway.training.loop import Loop
from kway.training.parts import training_parts
from kway.training.saving import FOLDER
from kway.training.spec import TrainSpec, interval, saving_interval
from kway.training.subject import subject_of
from kway.training.timeline import FILE as TIMELINE
from kway.training.timeline import check_timeline, timeline_steps
from kway.training.validation import BEST
from kway.units import counted, duration


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

    def __repr__(self) -> str:
        """Say how far the run came and its last figures; all of it is in ``record``."""
        record = self.record
        size = f"{counted(record.devices, 'device')}, {counted(record.steps, 'step')}"
        return f"Run({record.model}: {record.strategy} on {size}; {last_figures(record)})"


@alone
def train(
    job: Job,
    *,
    devices: Any = "auto",
    strategy: str | None = None,
    exactness: str = "math",
    shards: int = DEFAULT_SHARDS,
    step_kind: str = AUTO,
    settings: Mapping[str, Any] | None = None,
    tune: bool = True,
    tune_seconds: float | None = None,
    plan: Any = None,
    epochs: int = 10,
    steps: int | None = None,
    out: Path | str | None = None,
    callbacks: Iterable[Callback] = (),
    trackers: Iterable[str | Tracker] = (),
    validate_every: int | str = 1,
    log_every: int = 10,
    save_best: str | None = None,
    early_stop: str | None = None,
    patience: int | None = None,
    checkpoint_every: int | str | None = None,
    keep: int | None = None,
    resume: bool | Path | str = False,
    max_restarts: int = 0,
    min_devices: int = 1,
    on_oom: str = "error",
    stall_timeout: str | float | timedelta | None = None,
    timeline: bool | int | None = None,
    batch_size_per_device: int | None = None,
    lr_scale: str | None = None,
    lr_warmup: int | str | None = None,
    echo: bool = True,
    progress: bool = False,
    ranks: Any = None,
) -> Run:
    """Train ``job`` and return the run.

    ``devices``: ``"auto"``, a number, ``"cpu:N"``, ``"cuda:I,J"``, or a ``torch.device`` or a list of them.
    ``strategy``: ``"single"``, ``"data"``, ``"threads"`` or with a size, ``"data=2"``; ``"auto"`` for the fastest that
    a plan finds (``kway.plan``; what is not remembered of model and machine is found out first, in 10 s at most);
    ``None`` for data parallelism over the devices that are named; where none are, over all GPUs, or one device on CPUs.
    ``plan``: what ``kway.plan`` returned, or the path of its plan.json, in place of devices, strategy, step kind and,
    where it is open, batch size; a plan for less than ``exactness`` is refused.
    ``exactness``: ``"math"``, ``"bits"`` (equal bits on any number of devices up to ``shards``) or ``"loose"``.
    ``step_kind``: how a step runs: ``"eager"``, ``"compiled"`` and, on GPUs, ``"graph"`` or ``"compiled-graph"``;
    ``settings``: what else of it is chosen, by name (``kway.step.settings``): ``{"optimizer": "fused"}``. Where
    ``step_kind`` is ``"auto"``, what was measured to be fastest on this machine counts, and long runs measure first,
    for a twentieth of their time and a minute at most: see ``kway.tune``. ``tune_seconds``: measure for so long, also
    at level bits and in short runs; ``tune=False``: never, whatever is known. ``steps`` stops after that many
    optimizer steps. ``out``: a folder for train.json, curves.png, weights.safetensors and logs; ``None`` keeps
    nothing on disk. ``validate_every``: epochs, or like ``"200steps"``. ``save_best``: a
    validation figure whose best weights are kept: ``"validation_loss"``, the name of a metric, or ``METRIC/KEY``
    of one that returns a dict. ``early_stop``: the figure that ends the run when it was not better in
    ``patience`` validations in a row (``None``: 3); the weights stay those of the last step. Figures that end in
    ``loss`` are best when small.

    ``checkpoint_every``: like ``"200s"``, ``"500steps"`` or a number of epochs: the whole state of the run goes
    to ``out``/checkpoints/step-N while training goes on; the ``keep`` newest stay (all, where ``None``).
    ``resume=True`` goes on from the newest complete checkpoint there, or starts anew where there is none;
    a path names a run's folder or a checkpoint instead, which must be there. ``max_restarts``: how often the run
    is started again when a rank dies, on the devices that are left, ``min_devices`` at least, from the last
    complete checkpoint. With ``out``, SIGTERM and SIGUSR1 let all ranks stop after the same step and leave a
    checkpoint; a second one ends the run at once.

    ``on_oom="adapt"``: where memory runs out, the run is started again in the same way with half as many samples at
    once (``Job.micro_batch``), down to 1, and the same global batch: from the last complete checkpoint, or the
    beginning. Where that is too much still, or would change the result, the model's blocks are computed again in
    backward instead (``settings={"recompute": True}``); refused where it has none. The run has processes of its own,
    also on one device.

    ``stall_timeout``: like ``"90s"``, ``"5min"`` or seconds: a rank that the others wait for and that makes no
    progress for so long ends the run, with its step, phase and stack; ``None`` waits as long as torch does.

    ``timeline``: a number of steps (``True``: 5) that every rank records through torch's profiler after its warm-up:
    the record then says what their time went into, and ``out`` has one trace of all ranks, timeline.json.gz.

    ``batch_size_per_device``: the global batch is that times the number of devices: then the number does change the
    result, and a notice says what would be usual for the learning rate. ``lr_scale``: scale it so, against that of one
    device: ``"linear"`` or ``"sqrt"`` (``kway.step.scaling``), after a warm-up of ``lr_warmup`` epochs, or like
    ``"200steps"`` (``None``: 5 epochs, or a tenth of the run where that is less; 0: none).

    ``callbacks`` are called as ``(event, record)`` in the calling process, whatever the number of devices:
    ``start``, ``step`` (every ``log_every`` steps), ``validation``, ``epoch``, ``checkpoint`` (a save began),
    ``notice``, ``warning``, ``end``. ``trackers``: ``"tensorboard"`` (event files in ``out``/tensorboard), ``"wandb"``,
    ``"mlflow"``, or objects as ``kway.trackers`` makes them: they get the configuration and all figures of these
    events. One that fails is told of once, and ends no run. ``progress``: show how far the run is, in one line that is
    redrawn in a terminal or a notebook, in plain lines at intervals elsewhere. ``echo``: whether what ranks
    print, and what kway warns of there, is shown. ``ranks``: CPU ranks that are already started.

    Raises ``UsageError`` before anything starts or is written; ``NonFiniteError``; ``OutOfMemoryError``;
    ``StoppedError`` where the run was asked to stop; ``RankError`` where a rank fails, ``StallError`` where one makes
    no progress; inside one device, what the user's code raises.
    """
    check_given(job, ranks, out=out)
    stall, tell = duration("stall_timeout", stall_timeout), listeners(callbacks, progress)
    growth = growth_of(
        batch_size_per_device, lr_scale, lr_warmup, planned=plan is not None or strategy == AUTO
    )
    going = foreseen(
        plan,
        Going(
            job, devices, strategy, step_kind, exactness, shards,
            needing=threads.needing_processes(
                on_oom, stall_timeout=stall, max_restarts=max_restarts, tune_seconds=tune_seconds, timeline=timeline
            ),
        ),
        ranks,
        tell.say,
        partial(check_length_for, job, epochs, steps, timeline, resume),
    )  # fmt: skip
    where = going.place(stall is not None, settings)
    job = going.job if growth is None else growth.of(going.job, where.plan.devices)
    step_kind, exactness, shards = going.step_kind, going.exactness, going.shards
    threads.check(where, going.needing)
    spec = TrainSpec(
        job=job,
        plan=where.plan,
        folder="",
        epochs=epochs,
        steps=steps,
        validate_every=interval("validate_every", validate_every),
        log_every=log_every,
        save_best=figure_of(job, "save_best", save_best),
        early_stop=figure_of(job, "early_stop", early_stop),
        patience=patience_of(patience, early_stop),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        is_kept=out is not None,
        checkpoint_every=saving_interval("checkpoint_every", checkpoint_every),
        keep=keep,
        # What runs in threads is eager, as though the user had named that.
        tune=wish_of(tune, tune_seconds, where.plan.step_kind if where.in_threads else step_kind, exactness),
        as_begun=step_kind == AUTO,
        planned_kind=going.planned_kind,
        timeline=timeline_steps(timeline),
        warns=echo,
    )
    check_saving(out, checkpoint_every, keep, resume)
    restarts = Restarts(max_restarts, min_devices).check(where.plan.devices, where.joined is not None)
    parts, held = training_parts(job)
    check_timeline(spec, parts.order.steps(0), bool(resume))
    model = build(job)
    check_model(
        job, model, where.plan.layout, exactness, parts.order.batch_size, shards, settings=where.plan.settings
    )
    check_schedule(job, model, checkpoint_every, resume)
    adapting = adapting_of(on_oom, job, model, where, parts.order)
    spec = spec if growth is None else growth.over(spec, parts.order)
    spec = check_alike(
        where,
        replace(spec, facts=facts_with_code(spec.job, parts, where.plan, model), made=made_before(job)),
        parts,
        held,
    )
    checkpoint_of = partial(
        find,
        facts=spec.facts,
        model=model,
        check=partial(check_length, epochs=epochs, steps=steps),
        optimizer=partial(optimizer_of, spec.job, model),
    )
    with followed(tell, trackers, out), ExitStack() as stack:
        # First: a run that is at work there may remove what would be found.
        folder = _folder(stack, where, out, resume)
        found, told = on_main(where, lambda: checkpoint_of(out, resume))
        told = [*told, *saves_none(found, checkpoint_every)]
        if out is not None:
            stack.enter_context(
                says_what_is_there(folder, tell.stop, tell.begun, checkpoint_every is not None)
            )
        # An instance has been initialised here, and travels as it is: init must not run again on every rank.
        sent = replace(spec.job, model=model, init=None) if isinstance(job.model, nn.Module) else spec.job
        spec = replace(
            spec,
            job=sent,
            folder=str(folder),
            subject=subject_of(job, spec.facts, model, parts, held),
            resume=None if found is None else str(found),
            told=(
                *where.notices,
                *([] if growth is None else growth.replaced(going.job, where.plan.devices)),
                *told,
            ),
        )
        # What ran out of memory is free of it for certain when its process has ended.
        started = where.starts_ranks or adapting.is_on

        def once(where: Place, number: int) -> list[Any]:
            now = spec
            if number:
                newer, lines = checkpoint_of(folder, True)
                now = replace(
                    spec,
                    job=adapting.job(sent),
                    plan=where.plan,
                    resume=str(newer) if newer is not None else spec.resume,
                    told=(),
                    # What ended the run may have been a measurement.
                    tune=None if spec.tune is None else replace(spec.tune, why_not=STARTED_AGAIN),
                )
                # Where none were asked for, no checkpoint is missed.
                for line in [
                    *(lines if checkpoint_every is not None else []),
                    f"goes on from {now.resume or 'the beginning'}",
                ]:
                    tell.note(line)
            logs = logs_of(folder) if out is not None else None
            # On one device that is left a process of its own is started too: what killed the rank may come again.
            with _gone_if_refused(logs, tell.seen):
                return where.run(
                    run_rank,
                    now,
                    on_event=tell,
                    logs=logs,
                    echo=echo,
                    # Those that were handed in are gone with a start that failed.
                    ranks=ranks if getattr(ranks, "alive", True) else None,
                    stop=tell.stop,
                    apart=True,
                    stall_timeout=stall,
                )

        if started:
            # Without a folder it is kway that takes the signal, to end the ranks first; on one device nobody does.
            with asked_to_stop(tell.stop) if out is not None else says_that_nothing_is_there():
                results, where = run_again(where, once, restarts, shards, tell.note, tell.stop, adapting)
        else:
            # Ranks of their own have a copy of the loss as well: a callback that changes a module changes nothing.
            own = replace(spec, job=replace(sent, loss=loss_beside(model, job.loss)))
            # Signals arrive in no other thread than this.
            with asked_to_stop(tell.stop) if out is not None and where.in_threads else nullcontext():
                results = where.run(
                    run_rank,
                    own,
                    model,
                    on_event=tell,
                    ranks=ranks,
                    stop=tell.stop,
                    stall_timeout=stall,
                    leaves=None
                    if out is None
                    else partial(what_is_there, folder, checkpoint_every is not None),
                )
        of_ranks, average = results[0]
        record = kept(
            going.judged(
                replace(of_ranks, notices=[*where.notices, *told, *tell.told, *of_ranks.notices]), where
            ),
            where,
            out,
            folder,
            tell.note,
        )
        if started:
            # What ranks left there says what their models made when they ran.
            load_weights(cast(model, precision_of(job.precision).floating), folder)
            average = read_tensors(folder / "ema.safetensors") if job.ema is not None else None
    return Run(as_run(where.plan, record), record, model, Path(folder) if out is not None else None, average)


def run_rank(
    context: Any, spec: TrainSpec, model: nn.Module | None = None
) -> tuple[Training, dict[str, torch.Tensor] | None]:
    """Train on one rank; return the record, and to a process that handed in a model the average of the weights.

    The task that ``train`` sends. Processes that start ranks read the average from its file.
    """
    module = build(spec.job) if model is None else model
    # What kway started is ended by whoever started it.
    ends = context.world.origin != "local"
    with asked_to_stop(context.stop, ends) if spec.is_kept else nullcontext():
        spec = in_the_way_chosen(context, spec, module).in_force()
        loop = Loop(context.world, spec, module, context.emit, context.stop, context.status)
        return loop.run(), None if model is None else loop.average


@contextmanager
def _gone_if_refused(logs: Path | None, seen: set[str]) -> Iterator[None]:
    """Remove the logs of ranks that refuse a run before it starts (see ``seen``): exit code 2 leaves nothing."""
    try:
        yield
    except UsageError:
        if logs is not None and "start" not in seen:
            shutil.rmtree(logs, ignore_errors=True)
        raise


def _ways(path: Path | str) -> list[Path]:
    whole = Path(path).resolve()
    return [whole, *whole.parents]


def _folder(stack: ExitStack, where: Place, out: Path | str | None, resume: bool | Path | str) -> Path:
    """Claim the folder once for all ranks. A run that goes on finds there what it left."""
    own = resume is True or (resume is not False and out is not None and Path(out).resolve() in _ways(resume))
    if own and out is not None and is_there(Path(out) / "train.json"):
        raise UsageError(
            f"{out} holds the record of a run that has ended",
            "a record is never written over",
            "to train on, name the run with resume= (--resume-from) and another folder with out= (--out)",
        )
    others = (
        ()
        if own
        else ("weights.safetensors", "ema.safetensors", BEST, "curves.png", TIMELINE, FOLDER, EVENTS)
    )
    return Path(on_main(where, lambda: str(stack.enter_context(claimed(out, "train.json", others)))))
