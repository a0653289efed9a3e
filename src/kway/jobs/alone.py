"""What starts processes of its own, or has the machine to itself, is refused where ranks are already there."""

from kway.errors import UsageError
from kway.launch.torchrun import from_environment
from kway.units import counted


def refuse_among_ranks(what: str, need: str, do: str) -> None:
    """Raise ``UsageError`` where this process is one of several ranks that a launcher has started.

    ``what``: is asked for, ``need`` and ``do``: see ``UsageError``.
    """
    # Whatever its devices are: only the number of ranks counts.
    world = from_environment(device="cpu")
    if world is not None and world.size > 1:
        raise UsageError(f"{what} inside {counted(world.size, 'rank')} that are already there", need, do)


def speaks() -> bool:
    """Whether this process prints and writes: of ranks that something else started, rank 0 does."""
    world = from_environment(device="cpu")
    return world is None or world.is_main


def is_alone() -> bool:
    """Whether this process is none of several ranks that something else started."""
    world = from_environment(device="cpu")
    return world is None or world.size == 1
