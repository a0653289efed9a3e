"""A job: what to train, on which data, how. It knows nothing of devices."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kway.errors import UsageError
from kway.registry import known

PRECISIONS: Mapping[str, str] = {
    "fp64": "weights, inputs and arithmetic in 64-bit floating point",
    "fp32": "as the model is, 32-bit by default, TF32 off",
    "tf32": "32-bit storage, TF32 products on GPUs that have them",
    "bf16": "32-bit weights, bfloat16 autocast",
    "fp16": "32-bit weights, float16 autocast, with a gradient scaler",
}

# More are a mistake: each is a process of its own, on every rank, and takes a moment to start.
MOST_WORKERS = 1_024

_MAY_BE_LEFT_OUT = ("loss", "penalty", "schedule")

# What an epoch's row in the record holds besides metrics.
TAKEN_NAMES = frozenset(
    {
        "epoch",
        "step",
        "steps",
        "global_step",
        "samples",
        "validation_loss",
        "seconds",
        "samples_per_s",
        "lr",
        "loss",
        "event",
    }
)


@dataclass(frozen=True)
class Job:
    """One training job, in terms of one device.

    ``model``
        an ``nn.Module``, or a function without arguments that makes one. A function is called with torch's
        generator seeded by ``seed``. An instance holds the trained weights afterwards.
    ``loss``
        ``loss(output, target)``: a built-in loss of torch with any ``reduction``, or the class of a loss module;
        or a function that returns per-sample losses (averaged over all elements of the global batch), or
        ``(sum, weight)``, or a scalar (taken as a mean over the samples it saw). ``None``: the model takes the
        whole batch and returns ``(sum, weight)``.
    ``optimizer``
        called once with the model's named parameters: ``partial(torch.optim.SGD, lr=0.1)``.
    ``data``, ``validation``
        a map-style data set, a stream (``IterableDataset``, or an object with ``__iter__``), a tensor or array, a
        tuple or dict of them, or a ``DataLoader``, of which the data set, collate function, workers and sampler
        are kept.
    ``batch_size``
        the global batch, in samples, on any number of devices; it replaces that of a ``DataLoader`` in ``data``.
        ``None``: the loader's own, else 256.
    ``inputs``, ``target``
        how a batch reaches model and loss: a key, a list of keys or a function of the batch. By default the
        last element of a tuple, or the key ``target``, ``label`` or ``labels``, is the target.
    ``penalty``
        ``penalty(model)``, a scalar that follows from the weights alone: added to the loss once.
    ``schedule``
        called with the optimizer, returns a scheduler of torch, advanced once for each optimizer step.
    ``clip``
        a largest gradient norm, or ``("norm", x)`` or ``("value", x)``: applied to the reduced gradient.
    ``micro_batch``
        the most samples a device computes at once; gradients accumulate to the same global batch.
    ``metrics``
        by name: ``metric(output, target)`` returns per-sample values, ``(sum, weight)``, a number that counts
        once a sample, or a dict of these: any keys, on any share, added up by name with their own weights.
    ``init``
        the path of a weights file, or a function that is called with the model.
    ``ema``
        decay of an exponential moving average of the parameters, between 0 and 1: after each optimizer step
        that was taken, ``average = ema * average + (1 - ema) * parameter``, from the initial weights on.
        Validation judges the average.

    Raises ``UsageError`` for values that cannot work.
    """

    model: Any
    loss: Any
    optimizer: Callable[..., Any]
    data: Any
    validation: Any = None
    batch_size: int | None = None
    inputs: Any = None
    target: Any = None
    penalty: Callable[[Any], Any] | None = None
    schedule: Callable[[Any], Any] | None = None
    clip: float | tuple[str, float] | None = None
    micro_batch: int | None = None
    precision: str = "fp32"
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    init: Any = None
    seed: int = 0
    workers: int | None = None
    shuffle: bool = True
    name: str = ""
    ema: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work on any number of devices."""
        known("precision", self.precision, PRECISIONS)
        for what in ("model", "optimizer", "loss", "penalty", "schedule"):
            value = getattr(self, what)
            if not callable(value) and not (what in _MAY_BE_LEFT_OUT and value is None):
                raise UsageError(_of_type(what, value), "it must be callable", _advice(value, what))
        if isinstance(self.loss, type):
            # Called with output and target, a class would make an object of them.
            object.__setattr__(self, "loss", _loss_of(self.loss))
        for what in ("batch_size", "micro_batch"):
            _check_count(what, getattr(self, what), 1)
        _check_count("workers", self.workers, 0)
        if self.workers is not None and self.workers > MOST_WORKERS:
            raise UsageError(
                f"workers={self.workers}",
                f"at most {MOST_WORKERS:,}: each is a process of its own, on every rank",
                "as many as a rank has processors are mostly enough",
            )
        if not isinstance(self.shuffle, bool):
            raise UsageError(f"shuffle={self.shuffle!r}", "it must be True or False")
        if not callable(self.init):
            check_path("init", self.init, "it must be a path, or a function that is called with the model")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"seed={self.seed!r}", "it must be a whole number")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed}", "it must fit 64 bits")
        clip_rule(self.clip)
        if self.ema is not None and not _is_fraction(self.ema):
            raise UsageError(f"ema={self.ema!r}", "it must be a number between 0 and 1, without both")
        if not isinstance(self.metrics, Mapping):
            raise UsageError(
                _of_type("metrics", self.metrics),
                "it must be a dict of functions by name",
                'pass {"accuracy": kway.accuracy}, say',
            )
        for name, metric in self.metrics.items():
            if not callable(metric):
                raise UsageError(
                    _of_type(f"metric {name!r}", metric), "it must be callable", _advice(metric, "metric")
                )
            check_figure(name, f"a metric named {name!r}")

    @property
    def title(self) -> str:
        """A name for messages and folders."""
        name = self.name or getattr(self.model, "__name__", "") or type(self.model).__name__
        return str(name).strip("<>") or "model"


def check_path(what: str, path: Any, need: str = "it must be a path") -> None:
    """Raise ``UsageError`` for what cannot name a file or folder; ``None`` names none. ``need``: what could."""
    if path is None:
        return
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise UsageError(f"{what}={path!r}", need)
    if not os.fspath(path):
        # Taken for a path, it would be the current folder.
        raise UsageError(f"{what}={path!r}", "an empty text names nothing", "'.' is the current folder")
    if "\0" in os.fspath(path):
        raise UsageError(f"{what}={os.fspath(path)!r}", "no path holds a null character")


def check_figure(name: Any, what: str) -> None:
    """Raise ``UsageError`` for a metric's name that is no text or has another meaning in the record."""
    if not isinstance(name, str) or not name:
        raise UsageError(what, "the name of a figure must be a text")
    if name in TAKEN_NAMES or name.startswith("train_"):
        raise UsageError(what, "that name has a meaning in the record", "rename it")


def _is_fraction(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1


def _of_type(what: str, value: Any) -> str:
    return f"{what} is {value!r}" if isinstance(value, str) else f"{what} is of type {type(value).__name__}"


# What is meant where a name is given: of names only the command line knows some.
_FOR_EXAMPLE = {
    "model": "pass the class, or a function that makes it",
    "optimizer": "pass partial(torch.optim.SGD, lr=...), say",
    "loss": "pass nn.CrossEntropyLoss(), say",
    "schedule": "pass partial(torch.optim.lr_scheduler.StepLR, step_size=...), say",
    "metric": "pass kway.accuracy, say",
}


def _advice(value: Any, what: str) -> str:
    kind = type(value).__name__
    if isinstance(value, str):
        return _FOR_EXAMPLE.get(what, "")
    if hasattr(value, "param_groups"):
        return f"every device makes its own: pass partial(torch.optim.{kind}, lr=...)"
    if hasattr(value, "optimizer") and hasattr(value, "last_epoch"):
        options = "step_size=..." if kind == "StepLR" else "..."
        return f"every device makes its own: pass partial(torch.optim.lr_scheduler.{kind}, {options})"
    return ""


def _loss_of(kind: type) -> Any:
    if not hasattr(kind, "named_parameters"):
        raise UsageError(
            f"loss is the class {kind.__name__}",
            "of the classes only those of loss modules (nn.Module) are taken",
            "pass nn.CrossEntropyLoss, an object that can be called, or a function of output and target",
        )
    try:
        return kind()
    except TypeError as error:
        raise UsageError(
            f"loss {kind.__name__}, which cannot be made without arguments: {error}",
            "a class of losses is called without any",
            f"pass one that is made: {kind.__name__}(...)",
        ) from None


def _check_count(what: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{what}={value!r}", "it must be a whole number")
    if value < least:
        raise UsageError(f"{what}={value}", f"it must be at least {least}")


def clip_rule(clip: float | tuple[str, float] | None) -> tuple[str, float] | None:
    """Read ``Job.clip``: ``None``, or ``("norm" | "value", limit)`` with a positive limit."""
    if clip is None:
        return None
    kind, limit = clip if isinstance(clip, tuple | list) and len(clip) == 2 else ("norm", clip)
    if kind not in ("norm", "value") or isinstance(limit, bool) or not isinstance(limit, int | float):
        raise UsageError(f"clip={clip!r}", 'it must be a number, ("norm", number) or ("value", number)')
    if not limit > 0:
        raise UsageError(f"clip={clip!r}", "the limit must be greater than 0")
    return str(kind), float(limit)
