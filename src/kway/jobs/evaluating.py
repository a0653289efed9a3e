"""``kway.evaluate`` and ``kway.predict``: every sample once, in the order of the data set."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.checkpoints.loading import load_own_weights
from kway.comm.group import Group
from kway.data.padding import uneven
from kway.data.parts import Parts, take_apart
from kway.errors import UsageError
from kway.job import Job, check_path
from kway.jobs.arguments import check_job
from kway.jobs.heard import Heard
from kway.jobs.place import place
from kway.jobs.predictions import Piece, alike, merged
from kway.jobs.together import meet
from kway.launch.one_run import check_only_run
from kway.step.build import build, load_weights
from kway.step.modes import modes_of, set_modes
from kway.step.precision import cast, precision_of
from kway.step.put_back import put_back
from kway.strategies.engine import Engine

Weights = str | Path | Mapping[str, torch.Tensor] | nn.Module | None


def evaluate(
    job: Job,
    weights: Weights = None,
    *,
    data: Any = None,
    batch_size: int | None = None,
    devices: Any = "auto",
    strategy: str = "auto",
) -> dict[str, float]:
    """Return ``loss`` and every metric of ``job`` over ``data`` (default: its validation data, else its data).

    ``weights``: a safetensors file, a state dict or a module; ``None``: the job's model as it is. Each sample
    counts once on any number of devices, also the last ones of a ``DataLoader`` with ``drop_last``. ``batch_size``: the
    samples of a batch over all devices (default: a ``DataLoader``'s own, else the job's). ``strategy``: ``"auto"`` is
    data parallelism over the devices, without a plan. Prints what there is to know about data and devices on standard
    error. A module lies afterwards where it did, in its own dtypes. Raises ``UsageError`` before anything starts, and
    ``ReplicaError`` where the model is that of an open job of which ranks hold other weights than each other. Inside
    ranks that are there, what data, model or a metric raise on one of them is raised on all: on the others as a
    ``RankError`` that names the rank, where it is no error of kway's.
    """
    results = _on_ranks(evaluate_rank, job, weights, judged(job, data, batch_size), devices, strategy)
    values: dict[str, float] = results[0]
    return values


def predict(
    job: Job,
    weights: Weights = None,
    *,
    data: Any = None,
    batch_size: int | None = None,
    devices: Any = "auto",
    strategy: str = "auto",
) -> Any:
    """Return the model's outputs over ``data``, in the order of the data set, on the CPU.

    Tensors come back as one tensor of shape (samples, ...), nested tuples, dicts and dataclasses of them likewise.
    Raises ``UsageError`` where they are no rows of samples, or have another shape from batch to batch. See ``evaluate``
    for the arguments.
    """
    parts = judged(job, data, batch_size)
    results = _on_ranks(predict_rank, job, weights, parts, devices, strategy)
    return merged([piece for rank in results for piece in rank])


def _on_ranks(task: Any, job: Job, weights: Weights, parts: Parts, devices: Any, strategy: str) -> list[Any]:
    # Numbers that a run draws in another thread would not be those that it draws alone.
    check_only_run()
    where = place(devices, strategy)
    if where.is_main:
        for text in (*where.notices, *parts.notices):
            print(f"kway: {text}", file=sys.stderr)
    with ExitStack() as lent:
        model = _loaded(job, weights, lent)
        # The weights are judged as they are given: an average of them would be a second copy for nothing.
        bare = replace(job, model=model, init=None, micro_batch=None, ema=None)
        return where.run(task, bare, parts, where.plan.layout)


def judged(job: Job, data: Any = None, batch_size: int | None = None) -> Parts:
    """Return the parts of what is judged: ``data``, else the job's validation data, else its data.

    Raises ``UsageError`` and ``DataError`` for data that cannot be judged.
    """
    check_job(job)
    given = data if data is not None else job.validation if job.validation is not None else job.data
    return take_apart(
        given,
        batch_size=_batch(job, given) if batch_size is None else batch_size,
        seed=job.seed,
        shuffle=False,
        workers=job.workers,
        every=True,
    )


def _batch(job: Job, data: Any) -> int | None:
    return None if isinstance(data, torch.utils.data.DataLoader) else job.batch_size


def _loaded(job: Job, weights: Weights, lent: ExitStack) -> nn.Module:
    """Return what is judged. A module of the user's lies where it did when ``lent`` is closed: a job may be open."""
    if isinstance(weights, nn.Module):
        lent.enter_context(put_back(weights))
        return weights
    if isinstance(weights, str | Path):
        check_path("weights", weights)
    model = build(job)
    if model is job.model:
        lent.enter_context(put_back(model))
    cast(model, precision_of(job.precision).floating)
    if isinstance(weights, str | Path):
        load_weights(model, Path(weights))
    elif isinstance(weights, Mapping):
        load_own_weights(model, weights, "given as a state dict")
    elif weights is not None:
        raise UsageError(f"weights of type {type(weights).__name__}", "a file, a state dict or a module")
    return model


def evaluate_rank(context: Any, job: Job, parts: Parts, layout: dict[str, int]) -> dict[str, float]:
    """Evaluate on one rank."""
    values: dict[str, float] = _with_engine(
        context, job, parts, layout, "kway.evaluate", lambda engine, shares: engine.evaluate(shares)
    )
    return values


def predict_rank(context: Any, job: Job, parts: Parts, layout: dict[str, int]) -> list[Piece]:
    """Predict on one rank: (data set indices, output) of its part of every batch; inside ranks that were there
    before, of all ranks.

    Raises ``UsageError`` as ``alike`` does; inside ranks that were there before, on all of them.
    """
    joined = context.world.origin == "env"

    def use(engine: Engine, shares: Any) -> tuple[list[Piece], UsageError | None]:
        # All of them first: ranks may meet in each batch, and what a model or the data raise goes at once.
        with closing(engine.outputs(shares)) as outputs:
            found = list(outputs)
        try:
            return list(alike(found)), None
        except UsageError as refused:
            if not joined:
                raise
            # The other ranks do not know of it yet.
            return [], refused.with_traceback(None)

    own: tuple[list[Piece], UsageError | None] = _with_engine(
        context, job, parts, layout, "kway.predict", use
    )
    if not joined:
        return own[0]
    gathered = Group(context.world.rank, context.world.size).objects(own)
    for _, refused in gathered:
        if refused is not None:
            raise refused
    return [piece for pieces, _ in gathered for piece in pieces]


def _with_engine(context: Any, job: Job, parts: Parts, layout: dict[str, int], call: str, use: Any) -> Any:
    size, world = parts.order.batch_size, context.world
    if world.origin == "env":
        # A user's code calls it, on some ranks alone perhaps.
        meet(Group(world.rank, world.size, waiting=context.status.waiting), call, torch.device(world.device))
    with ExitStack() as undo:
        undo.callback(set_modes, modes_of(job.model))
        engine = Engine(
            job, job.model, layout, context.world, "math", size, status=context.status, trains=False
        )
        undo.callback(engine.close)
        loader = engine.loader(parts)
        undo.callback(loader.close)
        shares = loader.epoch(0)
        if world.origin == "env":
            # Whoever calls it may catch what is raised, and go on.
            with Heard(engine.mesh.world, call, engine.device, shares) as heard:
                result = use(engine, heard.shares)
        else:
            result = use(engine, shares)
        engine.warn()
        lines = uneven(engine.mesh.world.objects, loader.shapes)
        for line in lines if context.world.is_main else []:
            print(f"kway: {line}", file=sys.stderr, flush=True)
        return result
