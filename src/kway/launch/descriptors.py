"""File descriptors of this process: standard input, output and error, and how many it may have."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from kway.errors import UsageError

# What a process with torch has open besides three a rank, and what starting takes for a moment.
_BESIDE = 40


def open_missing() -> None:
    """Open those of descriptors 0 to 2 that are closed on the null device.

    Else the next socket gets such a number, and with it what is printed; in a process that is started with it,
    it is replaced by that one's own standard stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            # Also for its own sake: unlike what os.open gives, the copy is passed on to what this process starts.
            spare = os.dup(opened) if opened == number else opened
            os.dup2(spare, number)
            os.close(spare)


@contextlib.contextmanager
def enough(ranks: int) -> Iterator[None]:
    """Raise ``UsageError`` where this process may not open as many files as the start of ``ranks`` takes."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _BESIDE + 3 * ranks
        raise UsageError(
            f"{ranks} rank{'' if ranks == 1 else 's'} where this process may have {limit} files open",
            f"about {wanted} are needed",
            f"allow more: ulimit -n {max(1024, 2 * wanted)}",
        ) from None
