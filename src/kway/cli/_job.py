"""From the command line to a job."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

from kway import zoo
from kway.cli._choices import loss_of, optimizer_of
from kway.cli._config import micro_text
from kway.cli._objects import OWN, is_reference, load_object
from kway.data import sources
from kway.errors import KwayError, RankError, UsageError, line_of
from kway.job import Job
from kway.launch.own_frames import from_users_code
from kway.paths import check_reachable
from kway.registry import unknown

MODELS = "a module class, a function or a Job is needed"


def job_of(args: argparse.Namespace, targets: bool = True, /, **fixed: Any) -> tuple[Job, list[str]]:
    """Make the job that the flags describe, and the lines that say what was chosen.

    ``targets``: whether the command needs them; else any loss will do. ``fixed``: fields of the job that the
    command has read by itself. Raises ``UsageError``.
    """
    named = load_object("model", args.model) if is_reference(args.model) else None
    if isinstance(named, Job):
        return _overridden(named, args, fixed)
    if named is None and is_reference(args.model):
        raise UsageError(f"model {args.model!r} is None", MODELS)
    seed = 0 if args.seed is None else args.seed
    if named is None and not zoo.is_known(args.model):
        raise unknown("model", args.model, zoo.names(), OWN)
    optimizer, optimizer_text = optimizer_of("sgd" if args.optimizer is None else args.optimizer, args.lr)
    train, validation, source, data_text, notices = _data(args, seed)
    named_loss = args.loss if args.loss is not None else _usual_loss(train) if targets else "mse"
    loss = loss_of(named_loss)
    usual = "cross-entropy" if type(loss).__name__ == "CrossEntropyLoss" else "mse (usual for real targets)"
    loss_text = usual if args.loss is None else args.loss
    model, title = _model(args.model, named, source)
    job = Job(
        model=model,
        loss=loss,
        optimizer=optimizer,
        data=train,
        validation=validation,
        batch_size=args.batch_size,
        precision="fp32" if args.precision is None else args.precision,
        metrics=_metrics(loss),
        init=_existing(args.init),
        seed=seed,
        workers=args.workers,
        micro_batch=args.micro_batch,
        name=title,
    )
    job = replace(job, **fixed)
    lines = [
        f"model      {args.model}",
        f"data       {data_text}",
        f"loss       {loss_text}",
        f"optimizer  {optimizer_text}",
        f"batch      {_batch_text(job, args)}{micro_text(job.micro_batch)}, {job.precision}, seed {job.seed}",
    ]
    return job, lines + [f"note       {text}" for text in [*notices, *_still(args)]]


@contextmanager
def says_that_data_is_usual(args: argparse.Namespace, lines: list[str]) -> Iterator[None]:
    """Say of what the user's model raises on data that nobody named, that it was run on these.

    ``lines``: what ``job_of`` said. An error of several ranks gets a note; of one device, it becomes one of kway's.
    """
    try:
        yield
    except Exception as error:
        of_user = not error.died if isinstance(error, RankError) else not isinstance(error, KwayError)
        if not of_user or args.data is not None or not is_reference(args.model) or lines[0].startswith("job"):
            raise
        usual = f"{args.model} was run on the images of {sources.DEFAULT_SOURCE!r}"
        do = "for text pass --data text, for your own --data path/file.py:name"
        if isinstance(error, KwayError):
            error.add_note(f"no --data was given: {usual}; {do}")
            raise
        told = KwayError(f"{args.model} raised {line_of(error)}", f"no --data was given, so {usual}", do)
        told.traceback = "".join(format_exception(from_users_code(error)))
        raise told from None


def _still(args: argparse.Namespace) -> list[str]:
    return ["with --lr 0 no weight moves"] if getattr(args, "lr", None) == 0 else []


def _batch_text(job: Job, args: argparse.Namespace) -> str:
    """Say how many samples a batch holds, where the job itself may leave it to its data, a plan or the devices."""
    # Commands with such a flag check that it is the only one.
    per_device = getattr(args, "batch_size_per_device", None)
    return f"{per_device} a device" if per_device is not None else f"{_global_batch(job, args)} (global)"


def _global_batch(job: Job, args: argparse.Namespace) -> str:
    from torch.utils.data import DataLoader

    from kway.data.parts import DEFAULT_BATCH_SIZE
    from kway.planned import Planned

    plan = getattr(args, "plan", None)
    if job.batch_size is None and plan is not None and not isinstance(job.data, DataLoader):
        return str(Planned.load(plan).best["batch_size"])
    if job.batch_size is not None or not isinstance(job.data, DataLoader):
        return str(job.batch_size or DEFAULT_BATCH_SIZE)
    own = job.data.batch_size or getattr(job.data.batch_sampler, "batch_size", None)
    return str(own) if own else f"as {type(job.data.batch_sampler).__name__} makes it"


def _overridden(job: Job, args: argparse.Namespace, fixed: dict[str, Any]) -> tuple[Job, list[str]]:
    """Let flags that were given replace what a Job in the user's file says."""
    changes: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("batch_size", "precision", "seed", "workers", "micro_batch")
        if getattr(args, name) is not None
    }
    if args.init is not None:
        changes["init"] = _existing(args.init)
    if args.loss is not None:
        changes["loss"] = loss_of(args.loss)
    if args.optimizer is not None or args.lr is not None:
        if args.optimizer is None:
            raise UsageError(
                "--lr for a Job that has its own optimizer", "", "name one as well: --optimizer sgd"
            )
        changes["optimizer"] = optimizer_of(args.optimizer, args.lr)[0]
    if args.data is not None:
        train, validation, *_ = _data(args, job.seed)
        changes |= {"data": train, "validation": validation}
    changes |= fixed
    if not job.name:
        changes["name"] = args.model.rpartition(":")[2]
    job = replace(job, **changes)
    given = ", ".join(sorted(changes.keys() - {"name"}))
    # Folders and records go by the name.
    name = "" if job.title == args.model.rpartition(":")[2] else f", named {job.title}"
    line = f"job        {args.model}{name}" + (f" ({given} from the command line)" if given else "")
    return job, [line, *(f"note       {text}" for text in _still(args))]


def _data(args: argparse.Namespace, seed: int) -> tuple[Any, Any, Any, str, list[str]]:
    """Return (training data, validation data, source or None, description, notices)."""
    usual = None if is_reference(args.model) else zoo.usual_data(args.model)
    name = (usual or sources.DEFAULT_SOURCE) if args.data is None else args.data
    if not is_reference(name):
        root = data_root(args.data_dir)
        if name not in sources.names():
            raise unknown("data set", name, sources.names(), OWN)
        source = sources.load(name, root, seed)
        text = f"{source.name}: {len(source.train)} to train on, {len(source.validation)} held out"
        text += "" if args.data is not None else " (no --data was given)"
        return source.train, source.validation, source, text, list(source.notices)
    found = load_object("--data", name)
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        from kway.step.build import called

        found = called(f"--data {name}", found)
    if isinstance(found, tuple | list) and len(found) == 2 and not any(_is_array(item) for item in found):
        return found[0], found[1], None, f"{name}: {amounts(*found)}", []
    return found, None, None, f"{name}: {amounts(found)}", []


def amounts(train: Any, held_out: Any = None) -> str:
    """Say how many samples there are, as far as it is known without reading any."""
    parts = [
        what if count is None else f"{count} {short}"
        for data, what, short in (
            (train, "training data", "to train on"),
            (held_out, "validation data", "held out"),
        )
        if data is not None
        for count in [_count(data)]
    ]
    return ", ".join(parts)


def data_root(named: Path | None) -> Path:
    """Return the folder with one folder a data set: as named, else as KWAY_DATA says, else kway's own."""
    from kway.devices.torch_facts import cache_folder

    said = os.environ.get("KWAY_DATA")
    return named or (Path(said) if said else cache_folder() / "data")


def _count(data: Any) -> int | None:
    from torch.utils.data import BatchSampler, DataLoader

    from kway.data.arrays import in_memory

    held = data
    if isinstance(data, DataLoader):
        if data.batch_sampler is not None and type(data.batch_sampler) is not BatchSampler:
            return None  # which samples its batches hold is known when they are made
        held = data.sampler
    try:
        arrays = in_memory(held)
        return len(held if arrays is None else arrays)
    except Exception:  # a stream has no length, and what the user's own raises is said where it is needed
        return None


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape")


def _model(text: str, named: Any, source: Any) -> tuple[Any, str]:
    if named is not None:
        title = text.rpartition(":")[2]
        if not callable(named):
            raise UsageError(f"model {text!r} is a {type(named).__name__}", MODELS)
        return named, title
    if source is None:
        raise UsageError(
            f"the example model {text!r} on data of your own",
            "it needs the number of classes and the size of a sample, which named data sets know",
            "name a data set, or a model of your own",
        )
    return partial(zoo.get(text), source.shape, source.classes), text


def _usual_loss(data: Any) -> str:
    """Name the usual loss: cross-entropy for integer targets, MSE for real ones.

    Looks at one sample, in this process: the workers of a ``DataLoader`` do not start, and nothing is drawn.
    """
    import torch

    from kway.data.parts import take_apart
    from kway.data.share import cut
    from kway.data.stream_reader import held
    from kway.step.inputs import splitter

    size = None if isinstance(data, torch.utils.data.DataLoader) else 1
    parts = held(take_apart(data, batch_size=size, seed=0, shuffle=False), 0, 1)
    share = cut(parts, parts.order.batch(0, 0)[:1], epoch=0, step=0, rank=0, size=1, seed=0)
    target = splitter(None, None, True)(share.micro[0][0])[2]
    if not isinstance(target, torch.Tensor):
        raise UsageError(
            f"targets that are a {type(target).__name__}, and no --loss",
            "the usual loss is known for tensors of numbers",
            "name one: --loss path/file.py:name",
        )
    return "mse" if target.is_floating_point() else "cross-entropy"


def _metrics(loss: Any) -> dict[str, Any]:
    from torch import nn

    from kway.step.tally import accuracy

    return {"accuracy": accuracy} if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) else {}


def _existing(path: str | None) -> str | None:
    if path is None:
        return path
    for place in (Path(path), Path(path) / "weights.safetensors"):
        check_reachable("--init", place)
        if place.is_file():
            return path
    lacks = "it holds no weights.safetensors" if Path(path).is_dir() else "no such file or folder"
    raise UsageError(f"--init {path}", lacks, "name a run's folder, or a file like weights.safetensors")


def default_folder(title: str) -> Path:
    """Return a folder name for a run that is not taken yet: ``runs/TIME-MODEL``."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{title}"
    folder = Path("runs") / stem
    number = 2
    while folder.exists():
        folder = Path("runs") / f"{stem}-{number}"
        number += 1
    return folder
