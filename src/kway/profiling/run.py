"""A model profiled on one device: sittings opened, timed, looked into, and put together as a workload."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from kway.comm.rehearsed import Call
from kway.cost.memory import flat_bytes, named_bytes
from kway.devices import cpu
from kway.errors import RefusedError, UsageError, line_of
from kway.job import Job
from kway.launch.status import Status
from kway.profiling.bound import rates
from kway.profiling.inside import Inside, counts_of, kept_line, look_inside, rows
from kway.profiling.optimizer_text import optimizer_text
from kway.profiling.seats import Seat, seats
from kway.profiling.sitting import Reading, Sitting
from kway.profiling.sizes import gradients_of, parameters_of
from kway.profiling.timing import Spot, fits, time_in_turns, timings
from kway.profiling.workspaces import without_workspaces
from kway.records import Plan
from kway.step.host_draws import HostDraws
from kway.step.kinds import DEFAULT_KIND, KINDS
from kway.step.recompute import blocks_of
from kway.training.on_a_copy import copied
from kway.training.parts import training_parts
from kway.units import seconds_text

# Of the seconds there are, for the eager steps, and for what goes on inside of them; the rest is for other kinds.
TIMED, INSIDE = 0.6, 0.2
# Sittings are open at once where what their models and optimizers take is this part of the free memory.
AT_ONCE = 0.25
TYPES = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


# The most bytes that a step takes, by how many devices it is one of, and samples.
Peaks = dict[tuple[int, int], int]


@dataclass
class Profiled:
    """What ``Workload`` says of the model, by the names there."""

    batch_size: int
    samples: int | None
    fields: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """What is profiled: ``devices`` to prepare for at most, ``kinds`` of steps, in about ``seconds``.

    ``threads``: of the host, for a rank of so many devices.
    """

    device: str
    devices: int
    kinds: Sequence[str]
    seconds: float
    threads: Callable[[int], int]


@dataclass
class Seen:
    """What sittings have shown so far: a ``table`` of timings, peaks, collectives, and more."""

    table: list[dict[str, Any]] = field(default_factory=list)
    peaks: Peaks = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    inside: Inside | None = None
    kept: tuple[int, int] | None = None


class Profiler:
    """Profiles one job. ``plan``: level, shards and settings of its steps; ``say`` is told what goes on."""

    def __init__(
        self, job: Job, model: nn.Module, plan: Plan, wanted: Wanted, say: Callable[[str], None]
    ) -> None:
        self._job, self._model, self._plan, self._wanted, self._say = job, model, plan, wanted, say
        self._device = torch.device(wanted.device)
        parts = training_parts(replace(job, validation=None))[0]
        samples = parts.order.samples
        batch = parts.order.batch_size if samples is None else min(parts.order.batch_size, samples)
        self.found = Profiled(batch, samples)
        if batch < parts.order.batch_size:
            self._job = replace(job, batch_size=batch)
            self.found.notices.append(
                f"the data has {samples} sample{'s' * (samples != 1)}, fewer than a batch of {parts.order.batch_size}"
            )
        self._seats = seats(batch, wanted.devices, wanted.threads)

    def run(self) -> Profiled:
        """Do all of it. Raises ``UsageError`` where the model cannot be copied, or needs a larger batch for its
        statistics, and what its code raises.
        """
        copied_for_steps(self._model, self._job)
        begun = time.perf_counter()
        with torch_threads():
            table = self._eager()
            others = [kind for kind in self._wanted.kinds if kind != DEFAULT_KIND]
            for place, kind in enumerate(others):
                left = self._wanted.seconds - (time.perf_counter() - begun)
                table += self._other(kind, max(left, 0.0) / (len(others) - place))
        self.found.fields |= {"timings": table, "fits": fits(table)}
        return self.found

    def _eager(self) -> list[dict[str, Any]]:
        """Time eager steps, and look into those of one device alone."""
        seen = Seen()
        for group in self._together():
            names = ", ".join(str(seat.devices) for seat in group)
            self._say(f"eager steps, as one device of {names} takes them")
            self._sit(group, seen)
        if seen.inside is None:
            # More CPU ranks share one memory.
            more = "" if self._device.type == "cpu" else ", or name more devices: their shares are smaller"
            raise UsageError(
                f"no share that fits {self._wanted.device}: {self.found.notices[-1]}",
                "a step is timed on one device",
                "use a smaller batch (--batch-size), or the same one in parts (--micro-batch; of a model with batch "
                f"normalisation not at level math){more}",
            )
        self._remember(seen.inside, seen.peaks, seen.calls, seen.kept)
        return seen.table

    def _sit(self, group: Sequence[Seat], seen: Seen) -> None:
        """Open some seats at once, time their eager steps, and note what else they show."""
        with self._opened() as (opened, before):
            sittings = [self._open(seat, DEFAULT_KIND, opened) for seat in group]
            part = TIMED * self._wanted.seconds * len(group) / len(self._seats)
            seen.table += timings(DEFAULT_KIND, self._timed(sittings, part, parts=True))
            seen.peaks |= self._peaks(sittings, before)
            for sitting in sittings:
                if sitting.shares and seen.inside is None:
                    # The first is one device alone, but where its batch is too large for it.
                    self._say("what goes on inside of a step, by layer")
                    torch.set_num_threads(sitting.seat.threads)
                    seen.inside = look_inside(sitting, INSIDE * self._wanted.seconds)
                    self._describe(sitting, seen.inside)
                    with HostDraws() as watch:
                        # A walk of a second for a model of a large package, which one device has no use for.
                        if self._wanted.devices > 1:
                            self.found.fields["not_in_threads"] = sitting.not_in_threads(sitting.shares[0])
                        else:
                            sitting.take(sitting.shares[0])
                    self.found.fields["draws_on_cpu"] = watch.found
                if sitting.shares and sitting.seat.devices > 1 and not seen.calls:
                    seen.calls = sitting.rehearse(sitting.shares[0])
                    seen.kept = sitting.kept_for_gradients()

    def _other(self, kind: str, seconds: float) -> list[dict[str, Any]]:
        """Time steps of another kind; where that fails, say why: eager ones did not."""
        self._say(f"{kind} steps")
        seen = Seen()
        try:
            for seat in self._seats:
                self._sit_for(kind, seat, seconds / len(self._seats), seen)
        except Exception as error:
            self.found.left[kind] = line_of(error)
            return []
        if not seen.table:
            self.found.left[kind] = "no share fits"
        self._add_peaks(kind, seen.peaks)
        return seen.table

    def _sit_for(self, kind: str, seat: Seat, seconds: float, seen: Seen) -> None:
        """Time the steps of one seat. Raises ``RefusedError`` where they run otherwise than as ``kind``."""
        with self._opened() as (opened, before):
            sitting = self._open(seat, kind, opened)
            records = KINDS[kind].records
            # What is recorded is one piece.
            found = self._timed([sitting], seconds, parts=not records, recorded=records)
            if sitting.engine.ran != kind:
                notices = "; ".join(sitting.engine.notices)
                raise RefusedError(f"its steps ran {sitting.engine.ran}", notices)
            seen.table += timings(kind, found)
            seen.peaks |= self._peaks([sitting], before)

    def _timed(
        self, sittings: Sequence[Sitting], seconds: float, parts: bool, recorded: bool = False
    ) -> list[tuple[Spot, Reading]]:
        def longer(rest_s: float) -> None:
            self._say(f"single steps take long: about {seconds_text(rest_s)} more to time them")

        found, left = time_in_turns(sittings, seconds, parts, recorded, longer=longer)
        self.found.notices += left
        return found

    @contextmanager
    def _opened(self) -> Iterator[tuple[ExitStack, int]]:
        """Yield what sittings are opened on, and the bytes that are taken on a GPU before."""
        on_gpu = self._device.type == "cuda"
        # Of sittings before nothing is to be left: engines and their hooks refer to each other.
        gc.collect()
        if on_gpu:
            without_workspaces()
            torch.cuda.empty_cache()
        with ExitStack() as opened:
            yield opened, torch.cuda.memory_allocated(self._device) if on_gpu else 0

    def _open(self, seat: Seat, kind: str, opened: ExitStack, **settings: Any) -> Sitting:
        plan = replace(self._plan, step_kind=kind, settings={**self._plan.settings, **settings})
        torch.set_num_threads(seat.threads)
        return Sitting(self._job, self._model, plan, seat, self._wanted.device, opened, Status())

    def _together(self) -> Iterator[list[Seat]]:
        """Yield the seats that are open at once: all, so that they take turns, or each by itself.

        On a GPU each by itself: it is steadier, and its peak of memory is one sitting's.
        """
        held = sum(tensor.nbytes for tensor in [*self._model.parameters(), *self._model.buffers()])
        # Weights, gradients, and an optimizer with two states.
        needs = 4 * held * len(self._seats)
        if self._device.type == "cuda" or needs > AT_ONCE * cpu.memory()[1]:
            yield from ([seat] for seat in self._seats)
        else:
            yield list(self._seats)

    def _peaks(self, sittings: Sequence[Sitting], before: int) -> Peaks:
        """Return the most bytes that a step of each share takes on a GPU, beyond those there ``before``."""
        if self._device.type != "cuda":
            return {}
        return {
            (sitting.seat.devices, samples): sitting.peak(samples) - before
            for sitting in sittings
            for samples in sitting.shares
        }

    def _describe(self, sitting: Sitting, inside: Inside) -> None:
        """Note what one device alone shows: sizes and layers."""
        model = sitting.engine.model
        most = inside.counts[max(inside.counts)]
        every = most.all_flop
        self.found.fields |= {
            "sample_bytes": inside.sample_bytes,
            "flop_per_sample": None if every is None else every / max(inside.counts),
            "optimizer": optimizer_text(sitting.engine.optimizer),
            "parameters": parameters_of(model, sitting.engine.optimizer),
            "gradients": gradients_of(model),
            "layers": rows(model, inside, rates(self._device, TYPES.get(self._job.precision, torch.float32))),
        }
        if most.uncounted:
            names = ", ".join(sorted(most.uncounted))
            self.found.notices.append(f"operations could not be counted: nothing is known of {names}")
        self.found.notices += [*sitting.engine.notices, *sitting.engine.doubts, *sitting.parts.notices]

    def _remember(
        self, inside: Inside, peaks: Peaks, calls: Sequence[Call], kept: tuple[int, int] | None
    ) -> None:
        """Note memory and collectives."""
        fixed, each = kept_line(inside.counts, inside.sample_bytes)
        sizes, buckets = self.found.fields["parameters"], _buckets(calls)
        memory: dict[str, Any] = {
            "activation_bytes_per_sample": each,
            "activation_fixed_bytes": fixed,
            "workspace_bytes": 0,
            "checkpointed_activation_bytes_per_sample": self._checkpointed(inside.counts),
            "vector_bytes": None if kept is None else kept[0],
            "first_copies_bytes": None if kept is None else kept[1],
            "peak": [],
        }
        self.found.fields |= {
            "memory": memory,
            "collectives": _collectives(calls),
            "buckets": buckets,
        }
        vectors, _ = flat_bytes(sizes, memory, buckets, self._plan.exactness)

        def named(devices: int, samples: int) -> int:
            return round(named_bytes(sizes, memory, samples, vectors if devices > 1 else 0))

        if peaks:
            # Of one device alone, if the batch fits it, and the largest share.
            most = max(peaks, key=lambda row: (-row[0], row[1]))
            memory["workspace_bytes"] = max(0, peaks[most] - named(*most))
        else:
            spots = {(seat.devices, samples) for seat in self._seats for samples in seat.shares}
            peaks = {row: named(*row) for row in spots}
        self._add_peaks(DEFAULT_KIND, peaks)

    def _add_peaks(self, kind: str, peaks: Peaks) -> None:
        self.found.fields["memory"]["peak"] += [
            {"step_kind": kind, "devices": devices, "samples": samples, "bytes": bytes_}
            for (devices, samples), bytes_ in sorted(peaks.items())
        ]

    def _checkpointed(self, shares: Iterable[int]) -> float | None:
        """Return the bytes of a sample that stay for backward where the blocks are computed again.

        ``None`` where the model has no blocks, or cannot compute them again: one that appends to a cache of keys and
        values, say. Nobody has asked it to.
        """
        if not blocks_of(self._model) or self._plan.settings.get("recompute"):
            return None
        seat = self._seats[0]
        # The smallest that can be computed: what is counted is a line.
        sizes = sorted(shares)[:2]
        try:
            with self._opened() as (opened, _):
                sitting = self._open(seat, DEFAULT_KIND, opened, recompute=True)
                found = [counts_of(sitting, samples) for samples in sizes]
        except Exception as error:
            self.found.notices.append(
                f"what computing its blocks again would save is not known: {line_of(error.__cause__ or error)}"
            )
            return None
        counts = dict(zip(sizes, (counts for counts, _ in found), strict=True))
        return kept_line(counts, max(bytes_ for _, bytes_ in found))[1]


def copied_for_steps(model: nn.Module, job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """Return the copies that ``copied`` makes. Raises ``UsageError`` where there are none."""
    try:
        return copied(model, job)
    except Exception as error:
        raise UsageError(
            f"a model, loss, penalty or metric that cannot be copied ({line_of(error)})",
            "steps are timed on a copy, so that yours stay as they are",
            "let the job make the model (pass its class, or a function), or leave out of them what copy.deepcopy "
            "cannot copy",
        ) from error


def _collectives(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return what ranks of several call beside the sum of gradients, alike calls once."""
    found: dict[tuple[str, str, int], int] = {}
    for call in calls:
        if not call.gradients:
            key = call.when, call.what, call.bytes
            found[key] = found.get(key, 0) + 1
    return [
        {"when": when, "what": what, "bytes": bytes_, "times": times}
        for (when, what, bytes_), times in found.items()
    ]


def _buckets(calls: Sequence[Call]) -> list[int]:
    """Return the bytes of each call that brings gradients together, in the order of the calls."""
    return [call.bytes for call in calls if call.gradients]


@contextmanager
def torch_threads() -> Iterator[None]:
    """Give the process its number of threads back at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
