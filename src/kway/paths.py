"""Paths that a user named: what the system says of them, where it is more than that nothing is there."""

from pathlib import Path

from kway.errors import UsageError


def check_reachable(what: str, path: Path) -> None:
    """Raise ``UsageError`` where the system cannot look ``path`` up: a name too long, a folder that is closed.

    A path at which nothing is there passes: who needs it says what it was to be. ``what`` leads to it in the error.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: a name that no file can have
        pass
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror or error}") from None


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file; one that cannot be looked up is none."""
    try:
        return path.is_file()
    except OSError:
        return False
