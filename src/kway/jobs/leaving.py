"""What a run that is ended before its time leaves to go on from, and who says so."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kway.checkpoints.folder import places
from kway.checkpoints.reading import open_checkpoint
from kway.errors import StoppedError, UsageError
from kway.launch.interrupt import EndedBySignal
from kway.training.saving import FOLDER, to_go_on
from kway.training.validation import BEST
from kway.world import StopRequest

# Beside the record, of a run that came to its end.
_LEFT = ("weights.safetensors", "ema.safetensors", BEST, "curves.png")


@contextmanager
def says_what_is_there(folder: Path, stop: StopRequest, begun: Sequence[int], saves: bool) -> Iterator[None]:
    """Add to Ctrl-C and to signals that end the block what can be gone on with, as a note of the exception.

    ``begun``: the steps of the saves that began after ``stop`` was set. ``saves``: whether the run saves on its way.
    Raises ``StoppedError`` in place of a second order to stop that came when what the first one asked for was done.
    """
    try:
        yield
    except (KeyboardInterrupt, EndedBySignal) as error:
        if ended := _ended(folder):
            error.add_note(ended)
            raise
        step = last_complete(folder / FOLDER)
        if step is None:
            error.add_note(_nothing(saves))
            raise
        there = _is_complete(folder, step)
        if isinstance(error, EndedBySignal) and begun and step >= begun[-1]:
            raise StoppedError(
                f"stopped by {stop.by} after step {step}", there, to_go_on(str(folder))
            ) from None
        error.add_note(f"{there}; {to_go_on(str(folder))}")
        raise


def what_is_there(folder: Path, saves: bool) -> str:
    """Say what a run that ends now leaves in ``folder`` to go on from. ``saves``: whether it saves on its way."""
    if ended := _ended(folder):
        return ended
    step = last_complete(folder / FOLDER)
    return _nothing(saves) if step is None else f"{_is_complete(folder, step)}; {to_go_on(str(folder))}"


def _ended(folder: Path) -> str:
    """Say what a run has left that wrote its record, which no folder holds when a run begins; "" where it has not."""
    there = [name for name in ("train.json", *_LEFT) if (folder / name).is_file()]
    return f"the run has ended: {folder} holds {', '.join(there)}" if there[:1] == ["train.json"] else ""


def _nothing(saves: bool) -> str:
    if saves:
        return "no checkpoint is complete yet, so there is nothing to go on from"
    return "nothing to go on from was saved; --checkpoint-every (checkpoint_every=) saves on the way"


def _is_complete(folder: Path, step: int) -> str:
    return f"{folder / FOLDER / f'step-{step}'} is complete"


@contextmanager
def says_that_nothing_is_there() -> Iterator[None]:
    """Say on standard error that a signal ends the block, and that the run had no folder to leave anything in.

    Python ends in silence where a signal does, and the command line always has a folder.
    """
    try:
        yield
    except EndedBySignal as error:
        print(
            f"kway: ended by {error.name}: nothing was saved, as the run has no folder; name one with out=",
            file=sys.stderr,
        )
        raise


def last_complete(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint in ``folder``, by its manifest and sizes: nothing is read."""
    try:
        found = places(folder)
    except OSError:
        return None
    for place in found:
        try:
            return open_checkpoint(place.path).step
        except UsageError:
            continue
    return None
