"""The open jobs that a model's layers are part of: marked on the layers for as long as the jobs are open."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from kway.errors import RefusedError
from kway.step.batchnorm import layers


@dataclass(frozen=True, eq=False)
class OpenJob:
    """A job that trains ``model`` at ``level``. ``equalise``: brings what ranks hold of it to one value, or raises
    where their copies differ; a collective.
    """

    level: str
    model: nn.Module
    equalise: Callable[[], Any]


class _Open:
    """The open jobs that a layer is part of. A copy of the layer is part of none."""

    # No more than that: who compares what modules hold goes by what is in their objects, and jobs change.
    __slots__ = ("jobs",)

    def __init__(self) -> None:
        self.jobs: list[OpenJob] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Open, ()


_MARK = "_kway_open"


def open_jobs(model: nn.Module) -> list[OpenJob]:
    """List the open jobs that any layer of ``model`` is part of."""
    found: dict[OpenJob, None] = {}
    for _, layer in model.named_modules():
        mark = vars(layer).get(_MARK)
        if mark is not None:
            found |= dict.fromkeys(mark.jobs)
    return [*found]


@contextmanager
def opened(job: OpenJob) -> Iterator[None]:
    """While open, the layers of the job's model are part of it.

    Raises ``RefusedError`` for one that knows its batch and is part of an open job at another level: what it computes
    would be either's.
    """
    for name, layer in layers(job.model):
        other = next((each.level for each in open_jobs(layer) if each.level != job.level), None)
        if other is not None:
            raise RefusedError(
                f"layer {name!r} is part of another open job, at exactness {other}",
                f"this one is at {job.level}, and its batch statistics can be only one job's",
                "use one level for both",
            )
    marked = [layer for _, layer in job.model.named_modules()]
    marks = [vars(layer).setdefault(_MARK, _Open()) for layer in marked]
    for mark in marks:
        mark.jobs.append(job)
    try:
        yield
    finally:
        for layer, mark in zip(marked, marks, strict=True):
            mark.jobs.remove(job)
            if not mark.jobs:
                vars(layer).pop(_MARK, None)
