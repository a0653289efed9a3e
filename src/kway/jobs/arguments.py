"""What kway's functions are called with from Python: of the right kind, or an error that says what would be."""

from pathlib import Path
from typing import Any

from kway.errors import UsageError
from kway.job import Job, check_path
from kway.units import shown


def check_job(job: Any) -> None:
    """Raise ``UsageError`` for anything but a ``Job``."""
    if not isinstance(job, Job):
        raise UsageError(
            f"a {type(job).__name__} in place of a job", "a kway.Job is needed", "put the model into one"
        )


def check_given(job: Any, ranks: Any, **paths: Any) -> None:
    """Raise ``UsageError`` for a job, ranks or ``paths`` (by the names of the arguments) that are none."""
    check_job(job)
    for name, path in paths.items():
        check_path(name, path)
    if ranks is not None and not callable(getattr(ranks, "run", None)):
        raise UsageError(
            f"ranks is of type {type(ranks).__name__}",
            "it must be ranks that are already started",
            "leave it out: devices= says how many are started",
        )


def folder_of(path: Any) -> Path:
    """Return the folder that ``path`` names. Raises ``UsageError`` for what names none."""
    if path is None:
        raise UsageError("folder=None", "it must be a path")
    check_path("folder", path)
    return Path(path)


def functions_of(what: str, functions: Any) -> tuple[Any, ...]:
    """Return functions as a tuple. Raises ``UsageError`` for what is no list of functions."""
    if not hasattr(functions, "__iter__"):
        raise UsageError(
            f"{what} is of type {type(functions).__name__}",
            "it must be a list of functions",
            f"use {what}=[...]",
        )
    found = tuple(functions)
    for place, function in enumerate(found):
        if not callable(function):
            raise UsageError(f"{what}[{place}] is of type {type(function).__name__}", "it must be a function")
    return found


def truth(what: str, value: Any) -> bool:
    """Return ``value``, which must be True or False. Raises ``UsageError``."""
    if not isinstance(value, bool):
        raise UsageError(f"{what}={shown(value)}", "it must be True or False")
    return value
