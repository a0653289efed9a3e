"""How commands that look at a job before it is trained begin: its lines on the screen, a folder, a way to go on."""

import argparse
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kway.cli._job import default_folder, job_of
from kway.job import Job

# Of what was said of the job, what no record holds and the next command has to be told again.
_AGAIN = (
    "data",
    "data_dir",
    "precision",
    "seed",
    "workers",
    "loss",
    "optimizer",
    "lr",
    "init",
    "micro_batch",
)


@dataclass(frozen=True)
class Begun:
    """``lines``: what was said of the job; ``folder``: where records go; with ``json`` notes go to standard error."""

    job: Job
    lines: list[str]
    folder: Path
    json: bool

    def say(self, text: str) -> None:
        """Say what goes on."""
        self.show(f"note       {text}")

    def show(self, text: str) -> None:
        """Print to where no record goes."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)


def begun(args: argparse.Namespace) -> Begun:
    """Make the job that the flags describe and say so. Raises ``UsageError``."""
    job, lines = job_of(args)
    made = Begun(job, lines, args.out or default_folder(job.title), args.json)
    made.show("\n".join(lines))
    return made


def again(args: argparse.Namespace, *more: str) -> list[str]:
    """Return the flags that describe the job to the next command as it was described to this one, and ``more`` of it.

    ``more``: names of arguments, of which those that were not given (``None``) are left out as well.
    """
    given = {name: getattr(args, name) for name in (*_AGAIN, *more)}
    return [
        word
        for name, value in given.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def repeated(command: str, args: argparse.Namespace, but: Collection[str] = ()) -> list[str]:
    """Return the words of a command line that means ``args``. ``but``: names of arguments to leave out."""
    from kway.cli._grammar import command_of

    def given(dest: str, default: Any) -> list[Any]:
        value = getattr(args, dest, default)
        if dest in but or value == default:
            return []
        return value if isinstance(value, list) else [value]

    found = command_of(command)
    words = ["kway", command]
    words += [str(each) for place in found.places for each in given(place.dest, place.default)]
    for flag in found.flags:
        for each in given(flag.dest, flag.default):
            words += [flag.names[-1], str(each)] if flag.value else [flag.names[-1]]
    return words
