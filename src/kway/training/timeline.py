"""What recorded steps say: what their time went into, by rank, and one trace of all ranks."""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kway.comm.clocks import Offset
from kway.comm.group import Group
from kway.comm.to_first import to_first
from kway.errors import UsageError
from kway.records import write_atomically
from kway.report.timeline import within_text
from kway.report.traces import RankTrace, merged
from kway.training.spec import TrainSpec
from kway.training.stretch import UNREADABLE, Stretch, summed_up, why
from kway.units import counted

FILE = "timeline.json.gz"
STEPS = 5
# Steps before the recorded ones: what happens once happens there. The last of them is recorded and dropped, as the
# profiler itself takes time for its first events.
WARM_UP = 6


@dataclass(frozen=True)
class Timeline:
    """What one rank recorded. ``offsets``: of the clocks of all ranks; ``name``: what the trace calls this one."""

    group: Group
    offsets: Sequence[Offset]
    stretches: Sequence[Stretch]
    on_gpu: bool
    name: str

    def record(self, asked: int, folder: Path | None) -> tuple[dict[str, Any] | None, list[str]]:
        """Return what the record says, and lines for the user. A collective.

        ``asked``: how many steps were to be recorded; ``folder``: where rank 0 writes the trace, ``None`` for nowhere.
        ``None`` where a rank's trace cannot be read: the run is not lost for it, and no rank is left waiting.
        """
        row, trace, lost = self._own()
        told = self.group.objects((row, lost, folder is not None))
        rows = [row for row, _, _ in told]
        gone = {rank: lost for rank, (_, lost, _) in enumerate(told) if lost}
        if gone:
            texts = (f"the trace of rank {rank} cannot be read ({text})" for rank, text in gone.items())
            return None, [f"there is no timeline: {'; '.join(texts)}"]
        numbers = [number for stretch in self.stretches for number, _, _ in stretch.steps]
        notices = []
        if len(numbers) < asked:
            notices.append(
                f"the timeline has {counted(len(numbers), 'step')} of {asked}: the run ended before the others"
            )
        if self.on_gpu and not any(row["compute_s"] for row in rows):
            notices.append("the timeline has no work of GPUs: torch's profiler saw none (is it allowed to?)")
        # As the first rank has it, which writes.
        unwritten = self._write(trace, folder) if told[0][2] else None
        if unwritten:
            notices.append(f"the timeline could not be written: {unwritten}")
        within = max(offset.within_s for offset in self.offsets)
        found = {
            "steps": numbers,
            "warm_up": WARM_UP,
            "clock": within_text(within) if within else "the one clock of their machine",
            "within_s": within,
            "file": None if folder is None or unwritten else FILE,
            "ranks": rows,
        }
        return found, notices

    def _own(self) -> tuple[dict[str, Any], RankTrace | None, str]:
        """Return this rank's row of the record, and its trace on rank 0's clock; or why there is none."""
        rank = self.group.rank
        try:
            row, trace = summed_up(self.stretches, rank, self.name, self.offsets[rank].seconds, self.on_gpu)
        except UNREADABLE as error:
            return {}, None, why(error)
        return row, trace, ""

    def _write(self, trace: RankTrace | None, folder: Path | None) -> str | None:
        """Write one trace of all ranks to rank 0's ``folder``; return why that failed. A collective."""
        packed = zlib.compress(json.dumps(vars(trace)).encode(), 1)
        try:
            everyone = to_first(self.group, packed)
        except RuntimeError as error:
            return f"rank 0 did not get what all have recorded: {error}"
        if everyone is None or folder is None:
            return None
        try:
            text = json.dumps(
                merged(RankTrace(**json.loads(zlib.decompress(each))) for each in everyone),
                separators=(",", ":"),
            )
            write_atomically(folder / FILE, gzip.compress(text.encode(), 6))
        except UNREADABLE as error:
            return why(error)
        return None


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
