"""Steps of one rank that were recorded in one go, and what their traces say of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kway.report.intervals import union
from kway.report.timeline import activities, parts
from kway.report.traces import RankTrace, clock_shift

Span = tuple[str, float, float]
# How a trace shows that it is not what the profiler should have written: missing, cut off, without what is looked for.
UNREADABLE = (OSError, ValueError, LookupError, TypeError)


@dataclass
class Stretch:
    """Steps that were recorded in one go, in seconds of this rank's monotonic clock.

    ``steps``: (number, begin, end); ``inputs``: when the host waited for a batch; ``waits``: inside of a collective;
    ``marks``: see ``clock_shift``; ``file``: the profiler's trace; ``lost``: why there is none.
    """

    begin: float
    end: float = 0.0
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    inputs: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    marks: dict[str, tuple[float, float]] = field(default_factory=dict)
    file: Path = Path()
    lost: str = ""

    def spans(self) -> list[Span]:
        """Return what a row of this rank shows: its steps, when it waited for input, and for others."""
        steps = [(f"step {number}", begin, end) for number, begin, end in self.steps]
        return [*steps, *self.inputs, *((f"waits: {name}", begin, end) for name, begin, end in self.waits)]

    def export(self, profiler: Any, file: Path) -> None:
        """Let a profiler write its trace. A run goes on without: ``lost`` says why."""
        self.file = file
        try:
            profiler.export_chrome_trace(str(file))
        except (*UNREADABLE, RuntimeError) as error:
            self.lost = why(error)


def why(error: Exception) -> str:
    """Say what went wrong with a trace, in a few words."""
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return f"{type(error).__name__}: {text}"


def summed_up(
    stretches: Sequence[Stretch], rank: int, name: str, ahead: float, on_gpu: bool
) -> tuple[dict[str, Any], RankTrace]:
    """Return a rank's row of the record, and its trace on the first rank's clock, which its own is ``ahead`` s of.

    Raises one of ``UNREADABLE`` where the profiler's files are not what they should be.
    """
    total = dict[str, float]()
    trace = RankTrace(rank, name, [], [], [])
    for stretch in stretches:
        if stretch.lost:
            raise OSError(stretch.lost)
        events = json.loads(stretch.file.read_text())["traceEvents"]
        _shift(events, clock_shift(events, stretch.marks))
        waits, inputs = (union(span[1:] for span in kept) for kept in (stretch.waits, stretch.inputs))
        found = parts([(stretch.begin, stretch.end)], activities(events, waits, inputs, on_gpu))
        for part, seconds in {"step_s": stretch.end - stretch.begin, **found}.items():
            total[part] = total.get(part, 0.0) + seconds
        _shift(events, ahead * 1e6)
        trace.events.extend(events)
        trace.spans.extend((span, begin - ahead, end - ahead) for span, begin, end in stretch.spans())
        trace.windows.append((stretch.begin - ahead, stretch.end - ahead))
    steps = sum(len(stretch.steps) for stretch in stretches)
    means = {part: seconds / steps for part, seconds in total.items()}
    return {"rank": rank, **means, "clock_offset_s": ahead}, trace


def _shift(events: list[dict[str, Any]], ahead: float) -> None:
    """Put ``events`` on a clock that theirs is so many microseconds ahead of."""
    for event in events:
        if "ts" in event:
            event["ts"] -= ahead
