"""The streams that a command prints to: what cannot be printed is lost with one warning, and ends no run."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast


class Screen:
    """``stream``, until something cannot be written to it: from then on it takes everything and shows nothing.

    ``warn`` is called once then, with the reason. That whoever read a pipe went away is raised all the same: a
    command that nobody listens to ends.
    """

    def __init__(self, stream: TextIO, warn: Callable[[str], None]) -> None:
        self._stream, self._warn = stream, warn
        self.lost = False

    def write(self, text: str) -> int:
        """Write ``text``. Raises ``BrokenPipeError``."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Pass on what was written. Raises ``BrokenPipeError``."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], object]) -> None:
        if self.lost:
            return
        try:
            act()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.lost = True
            discard(self._stream)
            self._warn(error.strerror or str(error))


@contextlib.contextmanager
def screens() -> Iterator[Screen]:
    """Put screens in the place of this process's standard output, which is given, and standard error."""

    def warn(reason: str) -> None:
        print(
            f"kway: warning: standard output cannot be written: {reason}; nothing more is shown",
            file=sys.stderr,
            flush=True,
        )

    with contextlib.ExitStack() as stack:
        # Where a stream was closed before Python began there is none.
        out, errors = (stream or stack.enter_context(_nowhere()) for stream in (sys.stdout, sys.stderr))
        screen = Screen(out, warn)
        stack.enter_context(contextlib.redirect_stdout(cast(TextIO, screen)))
        # There is no other place to say that errors cannot be shown.
        stack.enter_context(contextlib.redirect_stderr(cast(TextIO, Screen(errors, lambda reason: None))))
        yield screen


def discard(stream: TextIO) -> None:
    """Let what ``stream`` holds, and the interpreter's own flush at exit, go nowhere instead of failing once more."""
    with contextlib.suppress(OSError, ValueError):
        target = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
