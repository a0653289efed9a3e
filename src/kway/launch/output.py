"""What ranks print: read by one thread, whole lines to the parent's streams, everything to log files."""

import contextlib
import os
import selectors
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

Echo = Callable[[int, str, str], None]
"""Called with rank, stream (``stdout`` or ``stderr``) and text that ends a line (or, alone, any text)."""

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20


def to_parent(ranks: int) -> Echo:
    """Write to the parent's own ``sys.stdout`` and ``sys.stderr``; with several ranks, mark each line."""

    def echo(rank: int, stream: str, text: str) -> None:
        target = getattr(sys, stream, None)
        if target is None:
            return
        # A closed or broken stream of the parent must not stop the ranks from being read.
        with contextlib.suppress(OSError, ValueError):
            target.write(text if ranks == 1 else f"[rank {rank}] {text}")
            target.flush()

    return echo


class _Stream:
    """One pipe of one rank."""

    def __init__(self, rank: int, name: str, fd: int, log: BinaryIO | None, whole_lines: bool) -> None:
        self.rank, self.name, self.fd, self.log = rank, name, fd, log
        self._whole_lines = whole_lines
        self._rest = b""

    def read(self) -> tuple[bool, list[str]]:
        """Read once: whether the pipe is still open, and the texts to echo."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except OSError:
            chunk = b""
        if not chunk:
            rest, self._rest = self._rest, b""
            return False, [self._text(rest)] if rest else []
        if self.log is not None:
            self.log.write(chunk)
            self.log.flush()
        if not self._whole_lines:
            return True, [chunk.decode(errors="replace")]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return True, [self._text(line) for line in lines]

    @staticmethod
    def _text(line: bytes) -> str:
        # A progress bar rewrites its line: what stood last before the line's end is what a terminal shows.
        shown = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        return shown.decode(errors="replace") + "\n"


class Output:
    """Reads the pipes of all ranks in a thread of its own until they are closed.

    ``logs``: folder for ``rank-N.log`` (both streams, byte for byte), or ``None``.
    """

    def __init__(self, ranks: int, echo: Echo | None, logs: Path | None) -> None:
        self._ranks, self._echo = ranks, echo
        self._logs = [(logs / f"rank-{rank}.log").open("wb") for rank in range(ranks)] if logs else []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._drained: list[threading.Event] = []
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read_all, name="kway-output", daemon=True)

    def add(self, rank: int, name: str, fd: int) -> None:
        """Read ``fd`` (owned from now on) as the stream ``name`` of ``rank``. Only before ``start``."""
        log = self._logs[rank] if self._logs else None
        self._selector.register(fd, selectors.EVENT_READ, _Stream(rank, name, fd, log, self._ranks > 1))

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def drain(self, timeout: float = 5.0) -> None:
        """Wait until all that the ranks have written so far has been passed on. Raises what ``echo`` raised."""
        event = threading.Event()
        self._drained.append(event)
        if self._thread.is_alive():
            os.write(self._wake_write, b"d")
            event.wait(timeout)
        if self._error is not None:
            raise self._error

    def note(self, rank: int, text: str) -> None:
        """Add ``text`` to the log of a rank, where there is one."""
        if self._logs:
            self._logs[rank].write(text.encode(errors="backslashreplace"))
            self._logs[rank].flush()

    def close(self, timeout: float = 5.0) -> None:
        """Pass on what is left and stop. The ranks should be gone: a pipe that is held open is given up."""
        self._ended = True
        if self._thread.is_alive():
            os.write(self._wake_write, b"e")
            self._thread.join(timeout)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        os.close(self._wake_write)
        self._selector.close()
        for log in self._logs:
            log.close()

    def _read_all(self) -> None:
        while True:
            waiting = bool(self._drained) or self._ended
            ready = self._selector.select(0 if waiting else None)
            for key, _ in ready:
                if key.data is None:
                    os.read(self._wake_read, _CHUNK)
                else:
                    self._pass_on(key.data)
            if not ready:
                drained, self._drained = self._drained, []
                for event in drained:
                    event.set()
                if self._ended:
                    return

    def _pass_on(self, stream: _Stream) -> None:
        still_open, texts = stream.read()
        for text in texts:
            self._show(stream, text)
        if not still_open:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)

    def _show(self, stream: _Stream, text: str) -> None:
        if self._echo is None or self._error is not None:
            return
        try:
            self._echo(stream.rank, stream.name, text)
        except Exception as error:  # pipes must be read on, or the ranks stop; the caller hears of it later
            self._error = error
