"""Live progress of a training run: one line redrawn where that is possible, plain lines at intervals elsewhere.

No colours and no escape sequences anywhere, so that a log holds what was said and nothing else.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from kway.report import lines
from kway.units import counted

# Redrawing more often than the eye follows only costs time on slow terminals.
REDRAW_S = 0.1
# In a log, a line inside an epoch says that the run is alive; more often would drown the epochs.
PLAIN_S = 30.0
# A run of more epochs than these has no line for each, but one in so many seconds: short epochs would flood a log.
MANY_EPOCHS = 50
EPOCH_S = 5.0
UNKNOWN_WIDTH = 80


def terminal_width(stream: TextIO) -> int:
    """Return the number of columns of the terminal behind ``stream``, 80 where it cannot be told."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or UNKNOWN_WIDTH
    except (OSError, ValueError):
        return UNKNOWN_WIDTH


class Progress:
    """Show the events of a training run on ``stream``.

    Call it with each event, a dict with ``event``:

    ``start``
        ``epochs``, ``steps_per_epoch`` and ``samples`` (in one epoch; ``None`` where only its end will tell),
        ``devices``, ``strategy``; ``stops_after``, the steps of the whole run where they may end it before its epochs;
        ``resumed_from_step``, the steps that were taken before, or ``None``; ``compiles``, whether the first steps wait
        for a compiler
    ``step``
        ``epoch`` (from 1), ``step`` (done in this epoch), ``steps`` and ``loss`` (or ``None``), ``samples`` over
        ``seconds`` (both since the epoch began)
    ``validation``
        ``epoch``, ``step``, ``validation_loss``, and one number for each metric
    ``epoch``
        one entry of ``Training.epochs``; ``earlier`` where all its steps were taken before the run went on
    ``notice``, ``warning``
        ``text``
    ``end``
        nothing; also what ``close`` does

    Other events are left alone. ``total_epochs`` serves where no ``start`` comes. ``live`` overrules what the
    stream says of itself; ``width`` returns the columns of the terminal, asked at each redraw because windows
    change; ``clock`` returns seconds.

    Every epoch has a line of its own, up to 50 of them. In longer runs the first and the last have, and one every 5 s.
    """

    def __init__(
        self,
        stream: TextIO,
        total_epochs: int | None = None,
        *,
        live: bool | None = None,
        width: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._live = stream.isatty() if live is None else live
        self._width = width or (lambda: terminal_width(stream))
        self._clock = clock
        self._epochs = total_epochs
        self._samples: int | None = None
        # Steps of an epoch, where the run may end inside one; epochs of the run, counted with their fractions.
        self._cut: int | None = None
        self._length: float | None = total_epochs
        # Whether steps that wait for a compiler are still to come; the samples and seconds of an epoch with such steps.
        self._compiles = False
        self._begun: tuple[int | None, float, float] = None, 0.0, 0.0
        self._header = ""
        self._metrics: dict[str, float] = {}
        # The epoch that they are of.
        self._judged: int | None = None
        self._drawn = 0
        self._last = float("-inf") if self._live else clock()
        # When the last epoch got its line; that of the last one without.
        self._told, self._untold = float("-inf"), ""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        match event.get("event"):
            case "start":
                self._start(event)
            case "step":
                self._step(event)
            case "validation":
                self._validation(event)
            case "epoch":
                self._epoch(event)
            case "notice":
                self._print(f"note       {event['text']}")
            case "warning":
                self._print(f"warning    {event['text']}")
            case "end":
                self.close()

    def close(self) -> None:
        """Leave the terminal on a clean line, below the last epoch's. Safe to call twice, and after a failure."""
        text, self._untold = self._untold, ""
        self._print(text)
        if self._drawn:
            self._erase()
            self._stream.flush()

    def _start(self, event: Mapping[str, Any]) -> None:
        self._epochs = event.get("epochs", self._epochs)
        self._samples = event.get("samples")
        self._length = self._epochs
        devices, last = event.get("devices"), event.get("stops_after")
        steps: Any = event.get("steps_per_epoch")
        epoch = (
            f"{counted(steps, 'step')} over {counted(self._samples, 'sample')}"
            if self._samples and steps
            else ""
        )
        if last is not None and not (epoch and self._epochs and last >= steps * self._epochs):
            parts = [f"stops after {counted(last, 'step')}"]
            if epoch:
                self._length, self._epochs, self._cut = last / steps, math.ceil(last / steps), steps
                parts.append(f"{epoch} an epoch")
            elif self._epochs:
                parts.append(f"{counted(self._epochs, 'epoch')} at most")
        else:
            parts = [counted(self._epochs, "epoch") if self._epochs else "", f"{epoch} each" if epoch else ""]
        if devices:
            parts.append(f"{event.get('strategy', '')} on {counted(devices, 'device')}".strip())
        if before := event.get("resumed_from_step"):
            parts.append(f"{counted(before, 'step')} taken before")
        header = ", ".join(part for part in parts if part)
        # Of a run that is started again only what is another one.
        self._print(header if header != self._header else "")
        self._header = header
        # A run that is started again compiles again.
        self._compiles, self._begun = bool(event.get("compiles")), (None, 0.0, 0.0)
        if self._compiles:
            self._print(
                "compiling  the first step takes seconds to minutes; so does the first of each other batch size"
            )

    def _step(self, event: Mapping[str, Any]) -> None:
        if self._compiles:
            self._compiles, self._begun = False, (event["epoch"], event["samples"], event["seconds"])
        now = self._clock()
        if now - self._last < (REDRAW_S if self._live else PLAIN_S):
            return
        self._last = now
        fields = self._step_fields(event)
        if self._live:
            self._draw(lines.fit(fields, self._width() - 1))
        else:
            self._print(lines.GAP.join(text for _, text in fields if text))

    def _step_fields(self, event: Mapping[str, Any]) -> list[tuple[int, str]]:
        loss = lines.number(event.get("loss"))
        samples, seconds = self._timed(event)
        left = self._seconds_left(event, samples, seconds)
        return [
            (0, f"epoch {lines.of(event['epoch'], self._epochs)}"),
            (1, f"step {lines.of(event['step'], event.get('steps'))}"),
            (4, lines.rate(samples, seconds) if samples else ""),
            (3, lines.time_left(left) if left is not None else ""),
            (2, f"loss {loss:.4f}" if loss is not None else ""),
            (5, self._last_known(event["epoch"])),
        ]

    def _last_known(self, epoch: int) -> str:
        """Return the last metrics, and of which epoch they are where it is another one."""
        text = lines.named(self._metrics)
        return f"{text} (epoch {self._judged})" if text and self._judged not in (None, epoch) else text

    def _timed(self, event: Mapping[str, Any]) -> tuple[float, float]:
        """Return the samples and seconds of this epoch that tell its rate: without the first steps that compile."""
        epoch, samples, seconds = self._begun
        if event["epoch"] != epoch:
            return event["samples"], event["seconds"]
        return event["samples"] - samples, event["seconds"] - seconds

    def _seconds_left(self, event: Mapping[str, Any], samples: float, seconds: float) -> float | None:
        """Estimate the training time left from this epoch's rate; validation is not in it."""
        if not (self._length and self._samples and event.get("steps") and samples):
            return None
        epochs_left = max(0.0, self._length - event["epoch"] + 1 - event["step"] / event["steps"])
        return float(epochs_left * self._samples * seconds / samples)

    def _validation(self, event: Mapping[str, Any]) -> None:
        self._metrics, self._judged = lines.metrics(event), event["epoch"]

    def _epoch(self, event: Mapping[str, Any]) -> None:
        found = lines.metrics(event)
        # An epoch without validation keeps the last known values for the live line.
        if found:
            self._metrics, self._judged = found, event["epoch"]
        train, held_out = lines.number(event.get("train_loss")), lines.number(event.get("validation_loss"))
        is_part = self._cut is not None and event["epoch"] == self._epochs and event["steps"] < self._cut
        part = f" ({event['steps']:,} of {self._cut:,} steps)" if is_part else ""
        part += " (trained before)" if event.get("earlier") else ""
        fields = [
            (0, f"epoch {lines.of(event['epoch'], self._epochs)}{part}"),
            (1, f"loss {train:.4f}" if train is not None else ""),
            (3, f"validation loss {held_out:.4f}" if held_out is not None else ""),
            (2, lines.named(found or lines.training_metrics(event))),
            (4, f"{event['seconds']:.1f} s" if "seconds" in event else ""),
            (5, lines.rate(event["samples_per_s"], 1.0) if "samples_per_s" in event else ""),
        ]
        text = lines.GAP.join(text for _, text in fields if text)
        if self._live:
            text = lines.fit(fields, self._width() - 1)
        now = self._clock()
        if self._is_passed_over(event["epoch"], now):
            self._untold = text
            if self._live and now - self._last >= REDRAW_S:
                self._last = now
                self._draw(text)
            return
        self._untold, self._told = "", now
        self._print(text)
        self._last = float("-inf") if self._live else now

    def _is_passed_over(self, epoch: int, now: float) -> bool:
        is_one_of_many = (self._epochs or 0) > MANY_EPOCHS and epoch != self._epochs
        return is_one_of_many and now - self._told < EPOCH_S

    def _print(self, line: str) -> None:
        if not line:
            return
        if self._drawn:
            self._erase()
        self._stream.write(line + "\n")
        self._stream.flush()

    def _draw(self, line: str) -> None:
        # Spaces rather than an escape sequence: this also works where the terminal knows none. Never more
        # than the width: in a window that shrank, they would wrap into a new line.
        self._stream.write("\r" + line.ljust(min(self._drawn, self._width() - 1)))
        self._stream.flush()
        self._drawn = len(line)

    def _erase(self) -> None:
        self._stream.write("\r" + " " * min(self._drawn, self._width() - 1) + "\r")
        self._drawn = 0
