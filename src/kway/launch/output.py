"""What ranks print: read by one thread, whole lines to the parent's streams, everything to log files."""

import codecs
import contextlib
import os
import selectors
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from kway.launch.log import Log

Echo = Callable[[int, str, str], None]
"""Called with rank, stream (``stdout`` or ``stderr``) and text that ends a line (or, alone, any text)."""

# As much as a pipe holds: one read empties it of what was there.
_CHUNK = 1 << 16
_LAST_READS = 32
_LONGEST_LINE = 1 << 20
_TAIL = 1 << 13


def to_parent(ranks: int) -> Echo:
    """Write to the parent's own ``sys.stdout`` and ``sys.stderr``; with several ranks, mark each line."""

    def echo(rank: int, stream: str, text: str) -> None:
        target = getattr(sys, stream, None)
        if target is None:
            return
        # A closed or broken stream of the parent must not stop the ranks from being read.
        with contextlib.suppress(OSError, ValueError):
            _write(target, text if ranks == 1 else f"[rank {rank}] {text}")
            target.flush()

    return echo


def _write(target: TextIO, text: str) -> None:
    try:
        target.write(text)
    except UnicodeEncodeError:  # a terminal that has not all characters is no reason to lose a line
        encoding = target.encoding or "ascii"
        target.write(text.encode(encoding, "backslashreplace").decode(encoding))


class _Stream:
    """One pipe of one rank."""

    def __init__(self, rank: int, name: str, fd: int, log: Log | None, whole_lines: bool) -> None:
        self.rank, self.name, self.fd, self.log = rank, name, fd, log
        self._whole_lines = whole_lines
        self._rest = self.tail = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> tuple[bool, list[str]]:
        """Read once: whether the pipe is still open, and the texts to echo."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except OSError:
            chunk = b""
        if not chunk and not self._whole_lines:
            rest = self._decoder.decode(b"", final=True)
            return False, [rest] if rest else []
        if not chunk:
            last, self._rest = self._rest, b""
            return False, [self._text(last)] if last else []
        self.tail = (self.tail + chunk)[-_TAIL:]
        warning = self.log.write(chunk) if self.log is not None else ""
        warnings = [warning] if warning else []
        if not self._whole_lines:
            # A character may come in two halves.
            return True, [*warnings, self._decoder.decode(chunk)]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return True, [*warnings, *(self._text(line) for line in lines)]

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
        self._logs = [Log(logs / f"rank-{rank}.log") for rank in range(ranks)] if logs else []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._streams: list[_Stream] = []
        # Registered by the thread that reads, which waits for them meanwhile.
        self._added: deque[_Stream] = deque()
        self._drained: list[threading.Event] = []
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read_all, name="kway-output", daemon=True)

    def add(self, rank: int, name: str, fd: int) -> None:
        """Read ``fd`` (owned from now on) as the stream ``name`` of ``rank``."""
        log = self._logs[rank] if self._logs else None
        stream = _Stream(rank, name, fd, log, self._ranks > 1)
        # A process that was replaced has no more to say.
        self._streams = [each for each in self._streams if (each.rank, each.name) != (rank, name)] + [stream]
        self._added.append(stream)
        if self._thread.is_alive():
            os.write(self._wake_write, b"a")

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

    def last_words(self, rank: int) -> str:
        """Return the end of what ``rank`` has written to its standard error so far."""
        tails = [each.tail for each in self._streams if each.rank == rank and each.name == "stderr"]
        return b"".join(tails).decode(errors="replace")

    def note(self, rank: int, text: str) -> None:
        """Add ``text`` to the log of a rank, where there is one."""
        if self._logs:
            self._logs[rank].write(text.encode(errors="backslashreplace"))

    def close(self, timeout: float = 5.0) -> None:
        """Pass on what is left and stop. The ranks should be gone: a pipe that is held open is given up."""
        self._ended = True
        if self._thread.is_alive():
            os.write(self._wake_write, b"e")
            self._thread.join(timeout)
        self._register()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        os.close(self._wake_write)
        self._selector.close()
        for log in self._logs:
            log.close()

    def _register(self) -> None:
        while self._added:
            stream = self._added.popleft()
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _read_all(self) -> None:
        reads_left = _LAST_READS
        while reads_left:
            self._register()
            # What was written before a call of ``drain`` is there by now, and is read in this turn, whatever a
            # rank that never stops printing adds.
            drained, self._drained = self._drained, []
            ready = self._selector.select(0 if drained or self._ended else None)
            for key, _ in ready:
                if key.data is None:
                    os.read(self._wake_read, _CHUNK)
                else:
                    self._pass_on(key.data)
            for event in drained:
                event.set()
            if self._ended:
                reads_left = reads_left - 1 if ready else 0

    def _pass_on(self, stream: _Stream) -> None:
        still_open, texts = stream.read()
        for text in filter(None, texts):
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
