"""Some steps of a run recorded through torch's profiler: what their time went into, and one trace of all ranks."""

import gzip
import json
import platform
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from kway.comm.clocks import offsets
from kway.comm.group import Group
from kway.devices.profiling import quiet
from kway.errors import UsageError
from kway.launch.status import Status
from kway.records import write_atomically
from kway.report.intervals import union
from kway.report.timeline import activities, parts, within_text
from kway.report.traces import RankTrace, clock_shift, merged
from kway.training.clock import StepClock
from kway.training.spec import TrainSpec
from kway.units import counted
from kway.world import World

T = TypeVar("T")
FILE = "timeline.json.gz"
STEPS = 5
# Steps before the recorded ones: what happens once happens there. The last of them is recorded and dropped, as the
# profiler itself takes time for its first events.
WARM_UP = 6
Span = tuple[str, float, float]


def check_timeline(spec: TrainSpec, an_epoch: int | None) -> None:
    """Raise ``UsageError`` where a run is too short for its timeline. ``an_epoch``: steps of one; ``None``: not known."""
    steps = spec.timeline
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


@dataclass
class _Stretch:
    """Steps that were recorded in one go, on this rank's monotonic clock. ``marks``: see ``clock_shift``."""

    begin: float
    end: float = 0.0
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    inputs: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    marks: dict[str, tuple[float, float]] = field(default_factory=dict)
    file: Path = Path()


class RecordingClock(StepClock):
    """A clock that has ``count`` steps of a run recorded, between points at which the device has been waited for.

    All ranks record the same steps. What comes between two steps and is no part of them (validation, saving) is left
    out: the recording goes on after it. Windows of ``StepClock`` leave out what is recorded. ``folder``: where rank 0
    writes the trace, ``None`` for nowhere; ``name``: what this rank is called there.
    """

    def __init__(
        self,
        device: torch.device,
        status: Status,
        group: Group,
        count: int,
        folder: Path | None,
        name: str,
    ) -> None:
        super().__init__(device, status)
        self._group, self._count, self._folder, self._name = group, count, folder, name
        self._left_to_warm = WARM_UP - 1
        self._recording = self._done = False
        self._profiler: Any = None
        self._open: _Stretch | None = None
        self._stretches: list[_Stretch] = []
        self._number, self._step_begun = 0, 0.0
        self._set_aside = self._own
        self._files = tempfile.TemporaryDirectory(prefix="kway-timeline-")

    def resume(self) -> None:
        """Start or go on measuring, or recording."""
        if self._recording:
            self._begin()
        else:
            super().resume()

    def pause(self) -> None:
        """Stop measuring, and recording."""
        if self._recording:
            self._end()
        else:
            super().pause()

    def stands(self) -> None:
        """Stop recording before training stands still."""
        if self._recording:
            self._end()

    def leave_out(self, stop: Any) -> None:
        """Leave a stop out, and go on recording."""
        if self._recording:
            self._begin()
        else:
            super().leave_out(stop)

    def waited(self, items: Iterable[T], steps: int = 0) -> Iterator[T]:
        """Pass items on as ``StepClock`` does; keep when each was waited for."""
        return super().waited(self._read(items, steps), steps)

    def _read(self, items: Iterable[T], steps: int) -> Iterator[T]:
        source = iter(items)
        self._number = steps
        while True:
            begun = time.monotonic()
            try:
                item = next(source)
            except StopIteration:
                return
            if self._open is not None:
                self._open.inputs.append(("input", begun, time.monotonic()))
            self._number += 1
            yield item

    def step(self, samples: int = 0) -> None:
        """Count one step. After those of warm-up recording begins, and after ``count`` more it ends."""
        if self._open is not None:
            now = time.monotonic()
            self._open.steps.append((self._number, self._step_begun, now))
            self._step_begun = now
            self._mark(self._open)
            if sum(len(stretch.steps) for stretch in [*self._stretches, self._open]) == self._count:
                self._finish()
            return
        super().step(samples)
        if self._done or self._recording:
            return
        if self._left_to_warm:
            self._left_to_warm -= 1
            if not self._left_to_warm:
                self._prepare()
        else:
            # What is recorded takes longer: no part of what is measured otherwise.
            super().pause()
            self._set_aside, self._own = self._own, None
            self._recording = True
            self._begin()

    def _prepare(self) -> None:
        """Let the profiler begin to record, for a step that is dropped. A collective."""
        self._offsets = offsets(self._group)
        quiet()
        self._profiler = self._new_profiler(warms_up=True)
        self._profiler.start()

    def _new_profiler(self, warms_up: bool) -> Any:
        kinds = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        begin = ProfilerAction.WARMUP if warms_up else ProfilerAction.RECORD
        return profile(activities=kinds, schedule=lambda step: ProfilerAction.RECORD if step else begin)

    def _begin(self) -> None:
        """Record from now on. A collective: all ranks begin together."""
        if self._open is not None:
            return
        if self._profiler is None:
            self._profiler = self._new_profiler(warms_up=False)
            self._profiler.start()
        else:
            self._profiler.step()
        self.synchronise()
        self._group.barrier()
        self._step_begun = time.monotonic()
        self._open = _Stretch(self._step_begun)
        self.status.note(self._open.waits)
        self._mark(self._open)

    def _end(self) -> None:
        """Record no more for now. What was recorded waits in a file."""
        if self._open is None:
            return
        stretch, self._open = self._open, None
        self.synchronise()
        stretch.end = time.monotonic()
        self.status.note(None)
        self._mark(stretch)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if stretch.steps:
            stretch.file = Path(self._files.name) / f"{len(self._stretches)}.json"
            profiler.export_chrome_trace(str(stretch.file))
            self._stretches.append(stretch)
        self.status.beat()

    def _mark(self, stretch: _Stretch) -> None:
        """Leave an event in the trace whose place on this rank's clock is known."""
        name = f"kway clock {len(stretch.marks)}"
        before = time.monotonic()
        with record_function(name):
            pass
        stretch.marks[name] = before, time.monotonic()

    def _finish(self) -> None:
        """Measure again as before. A collective: who has written its file first waits for the others."""
        self._end()
        self._recording, self._done = False, True
        self._own = self._set_aside
        self._group.barrier()
        super().resume()

    def timeline(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Return what the record says of the recorded steps, and lines for the user; write the trace. A collective.

        ``None`` where the run ended before there were any.
        """
        if self._recording:
            self._end()
        numbers = [number for stretch in self._stretches for number, _, _ in stretch.steps]
        notices = []
        if len(numbers) < self._count:
            notices.append(
                f"the timeline has {counted(len(numbers), 'step')} of {self._count}: the run ended before the others"
            )
        if not numbers:
            return None, notices
        row, trace = self._read_back(len(numbers))
        everyone = self._group.objects((row, self._packed(trace)))
        rows = [row for row, _ in everyone]
        if self.device.type == "cuda" and not any(row["compute_s"] for row in rows):
            notices.append("the timeline has no work of GPUs: the profiler saw none (is it allowed to?)")
        within = max(offset.within_s for offset in self._offsets)
        found = {
            "steps": numbers,
            "warm_up": WARM_UP,
            "clock": within_text(within) if within else "the one clock of their machine",
            "within_s": within,
            "file": None if self._folder is None else FILE,
            "ranks": rows,
        }
        if self._folder is not None and self._group.rank == 0:
            traces = [RankTrace(**json.loads(zlib.decompress(packed))) for _, packed in everyone]
            text = json.dumps(merged(traces), separators=(",", ":"))
            try:
                write_atomically(self._folder / FILE, gzip.compress(text.encode(), 6))
            except OSError as error:
                # A run is not lost for it.
                found["file"] = None
                notices.append(f"the timeline could not be written: {error.strerror or error}")
        return found, notices

    def _read_back(self, steps: int) -> tuple[dict[str, Any], RankTrace]:
        """Return this rank's row of the record, and its trace on rank 0's clock."""
        ahead = self._offsets[self._group.rank].seconds
        total = dict[str, float]()
        trace = RankTrace(self._group.rank, self._name, [], [], [])
        for stretch in self._stretches:
            events = json.loads(stretch.file.read_text())["traceEvents"]
            shift = clock_shift(events, stretch.marks)
            for event in events:
                if "ts" in event:
                    event["ts"] -= shift
            window = [(stretch.begin, stretch.end)]
            waits, inputs = (union(span[1:] for span in kept) for kept in (stretch.waits, stretch.inputs))
            found = parts(window, activities(events, waits, inputs, self.device.type == "cuda"))
            for name, seconds in {"step_s": stretch.end - stretch.begin, **found}.items():
                total[name] = total.get(name, 0.0) + seconds
            for event in events:
                if "ts" in event:
                    event["ts"] -= ahead * 1e6
            trace.events.extend(events)
            steps_taken = [(f"step {number}", begin, end) for number, begin, end in stretch.steps]
            spans = [*steps_taken, *stretch.inputs, *((f"waits: {name}", *at) for name, *at in stretch.waits)]
            trace.spans.extend((name, begin - ahead, end - ahead) for name, begin, end in spans)
            trace.windows.append((stretch.begin - ahead, stretch.end - ahead))
        means = {name: seconds / steps for name, seconds in total.items()}
        return {"rank": self._group.rank, **means, "clock_offset_s": ahead}, trace

    def _packed(self, trace: RankTrace) -> bytes:
        """Return a rank's trace as little as it goes to rank 0, or nothing where none is written."""
        return b"" if self._folder is None else zlib.compress(json.dumps(vars(trace)).encode(), 1)

    def close(self) -> None:
        """Leave nothing behind, also of a run that failed while steps were recorded."""
        self.status.note(None)
        profiler, self._profiler, self._open = self._profiler, None, None
        if profiler is not None:
            profiler.stop()
        self._files.cleanup()


def clock_of(spec: TrainSpec, world: World, group: Group, device: torch.device, status: Status) -> StepClock:
    """Return what times the steps of a run, and records some of them where that was asked for."""
    if spec.timeline is None:
        return StepClock(device, status)
    host = "" if world.local_size == world.size else f", {platform.node()}"
    name = f"rank {world.rank} ({world.device}{host})"
    folder = Path(spec.folder) if spec.is_kept else None
    return RecordingClock(device, status, group, spec.timeline, folder, name)
