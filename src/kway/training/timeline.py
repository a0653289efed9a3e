"""What recorded steps say: what their time went into, by rank, and one trace of all ranks."""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kway.comm.clocks import Offset
from kway.comm.group import Group
from kway.errors import UsageError
from kway.records import write_atomically
from kway.report.intervals import union
from kway.report.timeline import activities, parts, within_text
from kway.report.traces import RankTrace, clock_shift, merged
from kway.training.spec import TrainSpec
from kway.units import counted

FILE = "timeline.json.gz"
STEPS = 5
# Steps before the recorded ones: what happens once happens there. The last of them is recorded and dropped, as the
# profiler itself takes time for its first events.
WARM_UP = 6
Span = tuple[str, float, float]


@dataclass
class Stretch:
    """Steps that were recorded in one go, in seconds of this rank's monotonic clock.

    ``steps``: (number, begin, end); ``inputs``: when the host waited for a batch; ``waits``: inside of a collective;
    ``marks``: see ``clock_shift``; ``file``: the profiler's trace.
    """

    begin: float
    end: float = 0.0
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    inputs: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    marks: dict[str, tuple[float, float]] = field(default_factory=dict)
    file: Path = Path()

    def spans(self) -> list[Span]:
        """Return what a row of this rank shows: its steps, when it waited for input, and for others."""
        steps = [(f"step {number}", begin, end) for number, begin, end in self.steps]
        return [*steps, *self.inputs, *((f"waits: {name}", begin, end) for name, begin, end in self.waits)]


@dataclass(frozen=True)
class Timeline:
    """What one rank recorded. ``offsets``: of the clocks of all ranks; ``name``: what the trace calls this one."""

    group: Group
    offsets: Sequence[Offset]
    stretches: Sequence[Stretch]
    on_gpu: bool
    name: str

    def record(self, asked: int, folder: Path | None) -> tuple[dict[str, Any], list[str]]:
        """Return what the record says, and lines for the user. A collective.

        ``asked``: how many steps were to be recorded; ``folder``: where rank 0 writes the trace, ``None`` for nowhere.
        """
        numbers = [number for stretch in self.stretches for number, _, _ in stretch.steps]
        notices = []
        if len(numbers) < asked:
            notices.append(
                f"the timeline has {counted(len(numbers), 'step')} of {asked}: the run ended before the others"
            )
        row, trace = self._own(len(numbers))
        packed = b"" if folder is None else zlib.compress(json.dumps(vars(trace)).encode(), 1)
        everyone = self.group.objects((row, packed))
        rows = [row for row, _ in everyone]
        if self.on_gpu and not any(row["compute_s"] for row in rows):
            notices.append("the timeline has no work of GPUs: torch's profiler saw none (is it allowed to?)")
        within = max(offset.within_s for offset in self.offsets)
        found = {
            "steps": numbers,
            "warm_up": WARM_UP,
            "clock": within_text(within) if within else "the one clock of their machine",
            "within_s": within,
            "file": None if folder is None else FILE,
            "ranks": rows,
        }
        if folder is not None and self.group.rank == 0:
            traces = (RankTrace(**json.loads(zlib.decompress(packed))) for _, packed in everyone)
            text = json.dumps(merged(traces), separators=(",", ":"))
            try:
                write_atomically(folder / FILE, gzip.compress(text.encode(), 6))
            except OSError as error:
                # A run is not lost for it.
                found["file"] = None
                notices.append(f"the timeline could not be written: {error.strerror or error}")
        return found, notices

    def _own(self, steps: int) -> tuple[dict[str, Any], RankTrace]:
        """Return this rank's row of the record, and its trace on rank 0's clock."""
        ahead = self.offsets[self.group.rank].seconds
        total = dict[str, float]()
        trace = RankTrace(self.group.rank, self.name, [], [], [])
        for stretch in self.stretches:
            events = json.loads(stretch.file.read_text())["traceEvents"]
            _shift(events, clock_shift(events, stretch.marks))
            waits, inputs = (union(span[1:] for span in kept) for kept in (stretch.waits, stretch.inputs))
            found = parts([(stretch.begin, stretch.end)], activities(events, waits, inputs, self.on_gpu))
            for name, seconds in {"step_s": stretch.end - stretch.begin, **found}.items():
                total[name] = total.get(name, 0.0) + seconds
            _shift(events, ahead * 1e6)
            trace.events.extend(events)
            trace.spans.extend((name, begin - ahead, end - ahead) for name, begin, end in stretch.spans())
            trace.windows.append((stretch.begin - ahead, stretch.end - ahead))
        means = {name: seconds / steps for name, seconds in total.items()}
        return {"rank": self.group.rank, **means, "clock_offset_s": ahead}, trace


def _shift(events: list[dict[str, Any]], ahead: float) -> None:
    """Put ``events`` on a clock that theirs is so many microseconds ahead of."""
    for event in events:
        if "ts" in event:
            event["ts"] -= ahead


def check_timeline(spec: TrainSpec, an_epoch: int | None, goes_on: bool) -> None:
    """Raise ``UsageError`` where a run is too short for its timeline. ``an_epoch``: steps of one; ``None``: unknown.

    Of a run that ``goes_on`` nobody knows yet how many steps are left.
    """
    steps = None if goes_on else spec.timeline
    known = [spec.steps, None if an_epoch is None else an_epoch * spec.epochs]
    most = min((count for count in known if count is not None), default=None)
    if steps is not None and most is not None and most < WARM_UP + steps:
        raise UsageError(
            f"timeline={steps} in a run of {counted(most, 'step')}",
            f"{WARM_UP} steps of warm-up come before those that are recorded",
            f"let the run take {WARM_UP + steps} steps or more, or record fewer",
        )


def timeline_steps(value: bool | int | None) -> int | None:
    """Read ``True`` (as many as are usual), a number of steps, or nothing. Raises ``UsageError``."""
    if value is None or value is False:
        return None
    if value is True:
        return STEPS
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"timeline={value!r}", "it must be a whole number of steps, at least 1, or True")
    return value
