"""``kway.parallel``: a user's own loop on any number of devices."""

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.checkpoints.reading import Checkpoint, open_checkpoint
from kway.checkpoints.writer import Writer
from kway.comm.turns import Turns
from kway.data.loader import Share
from kway.data.padding import uneven
from kway.data.streams import StreamOrder
from kway.errors import KwayError, NonFiniteError, UsageError
from kway.job import Job
from kway.jobs.arguments import check_job, folder_of
from kway.jobs.heard import Heard
from kway.jobs.own_code import facts_with_code
from kway.jobs.own_loop import check_own_loop, check_share
from kway.jobs.place import Place, on_main, place, with_threads
from kway.jobs.resuming import find
from kway.jobs.together import together
from kway.launch.in_time import ends_in_time
from kway.launch.one_run import check_only_run, only_run
from kway.launch.own_watch import watching
from kway.launch.status import CALL, STEP, Status
from kway.step.build import build, made_before
from kway.step.kinds import DEFAULT_KIND
from kway.step.outcome import Outcome
from kway.step.scaling import waits_for_figure
from kway.step.seeds import preserved
from kway.strategies.engine import Engine
from kway.training.began import began_in, check_options
from kway.training.facts import check_within, earlier_ways, other_masks, resumed_notices
from kway.training.noted import noted_changes, noted_of
from kway.training.parts import training_parts
from kway.training.saving import RUN, Position, run_of, snapshot
from kway.training.weights import save_weights
from kway.units import duration
from kway.world import World


@contextmanager
def parallel(
    job: Job,
    *,
    devices: Any = "auto",
    strategy: str = "auto",
    exactness: str = "math",
    shards: int = 8,
    step_kind: str = DEFAULT_KIND,
    stall_timeout: str | float | timedelta | None = None,
) -> Iterator["Session"]:
    """Open ``job`` on the ranks that ``kway launch`` or torchrun started, or on this process alone.

    ``strategy``: ``"auto"`` is data parallelism over these ranks, without a plan.
    ``stall_timeout`` ends ranks of another launcher as ``kway.train`` does; ``kway launch`` has a flag for its own.
    Raises ``UsageError`` where ``devices`` asks for several devices outside of such ranks.
    """
    check_job(job)
    check_only_run()
    stall = duration("stall_timeout", stall_timeout)
    where = place(devices, strategy, exactness, shards, stall is not None, step_kind)
    check_own_loop(where, devices)
    world = where.joined or World(device=where.plan.device_set[0], threads=where.threads)
    with (
        only_run(),
        preserved(torch.device(world.device)),
        with_threads(world.threads),
        watching(world, stall) as status,
        nullcontext() if where.joined is None else ends_in_time(world, status),
    ):
        session = Session(job, where, world, status)
        try:
            yield session
        finally:
            session.close()


class Session:
    """One rank's side of a loop. Its methods are collectives: every rank calls them, in the same order. Those that are
    ``together`` raise ``MispairedError`` where another rank made another call.

    ``rank`` of ``size``; ``is_main`` on rank 0; ``model`` is this rank's module.
    """

    def __init__(self, job: Job, where: Place, world: World, status: Status | None = None) -> None:
        self._status = Status() if status is None else status
        train, held = training_parts(job)
        self.job, self.world, self.plan = job, world, where.plan
        self.rank, self.size, self.is_main = world.rank, world.size, world.is_main
        self.model: nn.Module = build(job)
        self._made = made_before(job)
        self._noted = noted_of(job, self.model, held)
        self._facts = facts_with_code(job, train, where.plan, self.model)
        self.engine = Engine(
            job,
            self.model,
            where.plan.layout,
            world,
            where.plan.exactness,
            train.order.batch_size,
            where.plan.shards,
            self._status,
            where.plan.step_kind,
        )
        self._group = self.engine.mesh.world
        if self._waits and held is None:
            self.engine.close()
            raise UsageError(
                "a ReduceLROnPlateau schedule in a loop of a job without validation data",
                "it goes by the validation loss",
                "set validation= in the job and call p.evaluate(), or take another schedule",
            )
        self._turns = Turns(self._group)
        self._loader = self.engine.loader(train)
        self._held = None if held is None else self.engine.loader(held)
        self.steps = 0
        # After how many steps a schedule that waits for figures had its last one.
        self._judged_at: int | None = None
        self._where = where
        self._began = began_in(self.engine)
        self._writer: Writer | None = None
        self._unsaid: list[str] = []
        self._said: list[str] = []
        self._is_uneven = False
        self._health = torch.zeros((), device=self.engine.device)
        self._notice()
        self.engine.draw_alike(self.steps)
        self._status.at("own code")

    def batches(self, epoch: int, start: int = 0) -> Iterator[Share]:
        """Yield this rank's share of every global batch of ``epoch`` (from 0), from batch ``start`` on."""
        return self._marked(self._loader.epoch(epoch, start))

    def _marked(self, shares: Iterator[Share]) -> Iterator[Share]:
        while True:
            self._status.at("input", self.steps + 1)
            share = next(shares, None)
            self._status.at("own code")
            if share is None:
                return
            yield share

    def step(self, share: Share) -> torch.Tensor:
        """Take one optimizer step over the global batch; return its loss, a scalar tensor equal on all ranks.

        Raises ``MispairedError`` where ranks hold shares of different batches, or have taken other steps before; on a
        GPU the loss is NaN. ``UsageError`` for what is no share of ``batches``.
        """
        check_share(share, len(self.engine.rows))
        self._status.at(STEP, self.steps + 1)
        # Part of what ranks compare: the loop is the user's, and may go on to another batch on one rank alone.
        self.engine.part.batch_group.trace.note("batch", (share.epoch, share.step, self.steps))
        outcome: Outcome = self.engine.step(share, self.steps)
        self.engine.draw_alike(self.steps + 1)
        self._status.at("own code")
        self.engine.warn()
        if self._unsaid:
            for line in self._unsaid if self.engine.drew else []:
                self.print(f"kway: {line}", file=sys.stderr)
            self._unsaid = []
        self._notice()
        self.steps += 1
        # NaN from the first loss on that is no number; nothing is waited for.
        self._health = self._health + outcome.loss.detach() * 0
        return outcome.loss

    def _notice(self) -> None:
        """Say once why steps run otherwise than asked for."""
        self._say(self.engine.notices)

    def _say(self, lines: list[str]) -> None:
        new = [line for line in lines if line not in self._said]
        for line in new:
            self.print(f"kway: {line}", file=sys.stderr)
        self._said += new

    def _compare_shapes(self) -> None:
        """Say what came up meanwhile, and once that parts of one batch came in several shapes.

        A collective, until that has been said. Where ranks meet anyway: the end of an epoch, or of the block, is not.
        """
        self._notice()
        if not self._is_uneven:
            loaders = [self._loader] if self._held is None else [self._loader, self._held]
            lines = uneven(self._group.objects, *(loader.shapes for loader in loaders))
            self._is_uneven = bool(lines)
            self._say(lines)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimizer. An option that a loop changes between two steps it changes on every rank alike."""
        return self.engine.optimizer

    @property
    def step_kind(self) -> str:
        """How steps really run: see ``step_kind`` of ``kway.train``."""
        return self.engine.ran

    @together("evaluate")
    def evaluate(self) -> dict[str, float]:
        """Return ``loss`` and every metric over the validation data, the same on all ranks.

        With ``Job.ema`` they are figures of the averaged weights. A schedule that waits for a figure
        (``ReduceLROnPlateau``) gets the loss, once for each number of steps. Raises ``UsageError`` where the job has
        none, ``ReplicaError`` where ranks hold other weights than each other, and ``RefusedError`` where they hold
        other buffers at exactness bits. What is raised on one rank is raised on all: see ``kway.evaluate``.
        """
        if self._held is None:
            raise UsageError("evaluate() of a job without validation data", "set validation= in the job")
        self.engine.equalise()
        shares = self._held.epoch(0)
        with (
            self.engine.averaged(),
            Heard(self._group, f"{CALL}evaluate", self.engine.device, shares) as heard,
        ):
            figures = self.engine.evaluate(heard.shares)
        self._compare_shapes()
        if self._waits and self._judged_at != self.steps:
            self._judged_at = self.steps
            self.engine.schedule.step(figures["loss"])
        return figures

    @property
    def _waits(self) -> bool:
        schedule = self.engine.schedule
        return schedule is not None and waits_for_figure(schedule)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    @together()
    def gather(self, value: Any) -> list[Any]:
        """Return one value of each rank, in rank order, on all ranks. Tensors come back on the CPU."""
        return self._group.objects(value.detach().cpu() if isinstance(value, torch.Tensor) else value)

    @together()
    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._group.barrier()

    @contextmanager
    def first_on_main(self) -> Iterator[None]:
        """Run a block on rank 0 first, then on the others: to prepare a file that all will read.

        The others wait as long as it takes.
        """
        if not self.is_main:
            self._turns.pass_on()
            yield
            return
        try:
            with self._status.doing("main only"):
                yield
        finally:
            self._turns.pass_on()

    @together("save")
    def save(self, folder: Path | str) -> Path:
        """Write ``weights.safetensors`` into ``folder``, made where it is missing; return the file's path.

        With ``Job.ema`` the averaged weights go beside it, into ``ema.safetensors``. Raises ``UsageError`` for what is
        no folder, or cannot be written, ``ReplicaError`` where ranks hold other weights than each other, and
        ``RefusedError`` where they hold other buffers at exactness bits.
        """
        path = folder_of(folder) / "weights.safetensors"
        self._compare_shapes()
        state = self.engine.state()
        average = None
        if self.job.ema is not None:
            with self.engine.averaged():
                average = self.engine.state()
        error = None
        if self.is_main:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                made = self._made | self.engine.made
                save_weights(state, path, made)
                if average is not None:
                    save_weights(average, path.with_name("ema.safetensors"), made)
            except OSError as problem:
                error = UsageError(f"{path} cannot be written: {problem.strerror}")
        self._raise(error)
        return path

    def _raise(self, error: KwayError | None) -> None:
        """Raise rank 0's error on all ranks: one that goes on alone waits for the others. A collective."""
        failed = self._group.objects(error)[0]
        if failed is not None:
            raise failed

    @together("save")
    def checkpoint(self, folder: Path | str, epoch: int, step: int = 0, keep: int | None = None) -> None:
        """Start to save all that the next step depends on as ``folder``/step-N; training can go on at once.

        ``epoch`` and ``step``: the batch that comes next. ``keep``: the newest that stay. What keeps it from being
        written is warned about, and the next one is tried again. Raises ``NonFiniteError`` where a loss was no number,
        ``ReplicaError`` where ranks hold other weights than each other, ``RefusedError`` where they hold other buffers
        at exactness bits, and ``UsageError`` for ``keep`` below 1, a ``folder`` that is none, and state that cannot be
        stored; on all ranks.
        """
        place = folder_of(folder)
        if not math.isfinite(float(self._health)):
            raise NonFiniteError(
                f"a loss since the last checkpoint, up to step {self.steps}, is no number",
                "nothing is saved over",
                "go on from the last checkpoint with a lower learning rate, or clip gradients",
            )
        self.engine.equalise()
        self._compare_shapes()
        error = None
        if self.is_main:
            try:
                self._begin_saving(place, keep, Position(self.steps, epoch, step))
            except KwayError as problem:
                error = problem
        self._raise(error)
        self._warn()
        self._say(self.engine.unsaved())

    def _begin_saving(self, place: Path, keep: int | None, position: Position) -> None:
        if self._writer is None or self._writer.folder != place:
            # Made first: where that is refused, the one before goes on.
            writer = Writer(place, keep)
            self._end_saving()
            self._writer = writer
            # What keeps the folder from being made is told by the writer, which needs it.
            with suppress(OSError):
                place.parent.mkdir(parents=True, exist_ok=True)
        facts, run = {**self._facts, "noted": self._noted}, {"judged_at": self._judged_at}
        prepared = self._writer.prepare(snapshot(self.engine, position, self.plan, facts, self._began))
        prepared.add(RUN, run_of(position, run))
        self._writer.save(prepared)

    @together()
    def resume(self, folder: Path | str) -> Position:
        """Go on from the newest complete checkpoint in ``folder``; where there is none, from the beginning.

        Returns the epoch and the step in it of the batch that comes next. Raises ``UsageError`` that lists what
        differs where it is of another job.
        """
        place = folder_of(folder)
        path, lines = on_main(
            self._where,
            lambda: find(None, place, self._facts, self.model, self._fits, lambda: self._began, lenient=True),
        )
        for line in lines:
            self.print(f"kway: {line}", file=sys.stderr)
        if path is None:
            return Position(self.steps, 0, 0)
        checkpoint = open_checkpoint(path)
        check_within(checkpoint, self.engine.holds_within)
        self.engine.restore(checkpoint)
        self.steps, self._judged_at = checkpoint.step, checkpoint.part("run").get("judged_at")
        self.engine.draw_alike(self.steps)
        streams = isinstance(self._loader.parts.order, StreamOrder)
        lines = [*earlier_ways(checkpoint, self.plan), *noted_changes(checkpoint, self._noted, self._facts)]
        for line in [*resumed_notices(checkpoint, streams), *lines]:
            self.print(f"kway: {line}", file=sys.stderr)
        self._unsaid = other_masks(checkpoint, self.plan)
        return Position(self.steps, checkpoint.epoch, checkpoint.part("run")["step_of_epoch"])

    def _fits(self, checkpoint: Checkpoint) -> None:
        check_options(checkpoint, self._began, self.engine.holds_within)

    def _end_saving(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._warn()

    def _warn(self) -> None:
        if self._writer is not None and self._writer.failed:
            warnings.warn(f"{self._writer.failed}; {self._writer.after_failure}", stacklevel=3)

    def close(self) -> None:
        """End loader workers and take kway's changes off the model."""
        self._end_saving()
        self._say(self.engine.left_out)
        # What it has taken counts now, not what it had begun to read.
        self._status.at("own code", self.steps)
        self._loader.close()
        if self._held is not None:
            self._held.close()
        self.engine.close()
