"""Some steps of a run recorded through torch's profiler, between points at which the device has been waited for."""

import platform
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from kway.comm.clocks import offsets
from kway.comm.group import Group
from kway.devices.profiling import quiet
from kway.launch.status import Status
from kway.training.clock import StepClock
from kway.training.spec import TrainSpec
from kway.training.stretch import Stretch
from kway.training.timeline import WARM_UP, Timeline
from kway.world import World

T = TypeVar("T")


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
        self._open: Stretch | None = None
        self._stretches: list[Stretch] = []
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
        self._open = Stretch(self._step_begun)
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
            stretch.export(profiler, Path(self._files.name) / f"{len(self._stretches)}.json")
            self._stretches.append(stretch)
        self.status.beat()

    def _mark(self, stretch: Stretch) -> None:
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

        ``None`` where the run ended before there were any, or where what was recorded cannot be read.
        """
        if self._recording:
            self._end()
        if not self._stretches:
            return None, [
                f"there is no timeline: the run ended before its first step after {WARM_UP} of warm-up"
            ]
        timeline = Timeline(
            self._group, self._offsets, self._stretches, self.device.type == "cuda", self._name
        )
        return timeline.record(self._count, self._folder)

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
