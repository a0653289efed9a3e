"""How far a download is: one line redrawn on a terminal, and elsewhere one every 30 s at most."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from kway.report import lines
from kway.report.progress import PLAIN_S, REDRAW_S, terminal_width
from kway.units import bytes_text, rate_text, seconds_text

# Seconds that a rate is taken over: what a line did minutes ago says little of what is left.
_RECENT_S = 10.0


class Transfer:
    """Show the events of a download on ``stream``: see ``kway.data.download``.

    ``live`` overrules what the stream says of itself; ``width`` returns the columns of the terminal; ``clock`` returns
    seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        live: bool | None = None,
        width: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._clock = stream, clock
        self._live = stream.isatty() if live is None else live
        self._width = width or (lambda: terminal_width(stream))
        self._drawn = 0
        self._file, self._last = "", float("-inf")
        self._since: list[tuple[float, int]] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        if event["event"] == "notice":
            self._print(f"note       {event['text']}")
            return
        file, done, of, now = event["file"], event["done"], event["of"], self._clock()
        begins = file != self._file or (self._since and done < self._since[-1][1])
        if begins:
            # The first block is what the rate is counted from: before it, there was the way to the server.
            self._file, self._since = file, [(now, done)]
            self._last = float("-inf") if self._live else now
            if not self._live:
                self._print(f"{file}  {bytes_text(of)}")
        while len(self._since) > 1 and self._since[1][0] < now - _RECENT_S:
            self._since.pop(0)
        if now - self._since[-1][0] >= REDRAW_S:
            self._since.append((now, done))
        if done == of:
            self._print(f"{file}  {bytes_text(of)} downloaded")
            self._file, self._since = "", []
        elif now - self._last >= (REDRAW_S if self._live else PLAIN_S):
            self._last = now
            self._show(file, done, of, now)

    def close(self) -> None:
        """Leave the terminal on a clean line. Safe to call twice, and after a failure."""
        if self._drawn:
            self._stream.write("\r" + " " * min(self._drawn, self._width() - 1) + "\r")
            self._stream.flush()
            self._drawn = 0

    def _show(self, file: str, done: int, of: int, now: float) -> None:
        since, before = self._since[0]
        rate = (done - before) / (now - since) if now > since else 0.0
        fields = [
            (0, file),
            (1, f"{100 * done // of} %"),
            (3, f"{bytes_text(done)} of {bytes_text(of)}"),
            (4, rate_text(rate, "B/s") if rate else ""),
            (2, f"{seconds_text(max(1, round((of - done) / rate)))} left" if rate else ""),
        ]
        if not self._live:
            self._print(lines.GAP.join(text for _, text in fields if text))
            return
        line = lines.fit(fields, self._width() - 1)
        self._stream.write("\r" + line.ljust(min(self._drawn, self._width() - 1)))
        self._stream.flush()
        self._drawn = len(line)

    def _print(self, line: str) -> None:
        self.close()
        self._stream.write(line + "\n")
        self._stream.flush()
