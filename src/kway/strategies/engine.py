"""The engine: a job opened on a layout by folding its axes in order."""

import sys
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from kway.checkpoints.loading import load_own_weights
from kway.checkpoints.names import own_parameters, own_weights
from kway.checkpoints.optimizer import options_by_name
from kway.checkpoints.reading import Checkpoint
from kway.comm.mesh import Mesh
from kway.data.loader import Loader, Share, cut
from kway.data.order import Indices, bounds
from kway.data.padding import Shapes
from kway.data.parts import Parts
from kway.data.seeds import key
from kway.devices.cpu import keep_freed_memory
from kway.errors import RefusedError
from kway.job import Job
from kway.launch.status import Status
from kway.step.batchnorm import without_statistics
from kway.step.build import make_optimizer
from kway.step.checkpointing import buffers_kept
from kway.step.deterministic import bits_hold_within
from kway.step.gradients import dense
from kway.step.handed import held_state, load_state
from kway.step.hooked import hooked_layers
from kway.step.kinds import DEFAULT_KIND, Runner, open_kind
from kway.step.lengths import Lengths
from kway.step.modes import begin_training
from kway.step.open_jobs import OpenJob, open_jobs, opened
from kway.step.out_of_memory import Memory, explained
from kway.step.outcome import Outcome
from kway.step.pieces import piece_bytes
from kway.step.plain_attributes import SinceThen
from kway.step.precision import cast, precision_of
from kway.step.recompute import not_again
from kway.step.scripted import check_scripted, scripted
from kway.step.seeds import seed_generators
from kway.step.settings import AS_IT_IS, Settings
from kway.step.state import load_parts, parts_of
from kway.step.tally import Tally
from kway.step.telling import EACH_STEP, Telling
from kway.strategies.base import Part
from kway.strategies.evaluation import Evaluation
from kway.strategies.layout import axes, check_level, check_model, check_step_kind
from kway.strategies.levels import DEFAULT_SHARDS, level_of
from kway.strategies.micro_batches import why_whole
from kway.world import World


class Engine:
    """One rank's side of a job on a layout. All ranks make the same calls in the same order.

    ``model`` is the rank's own module, already initialised; it is moved to the rank's device and is the
    trained model afterwards. ``options_made``: those of the optimizer's groups before a schedule changed them, as
    texts. ``step_kind``: how steps are to run (``kway.step.kinds``); ``trains``: whether
    there will be any; ``telling``: which of them tell what ranks called; ``settings``: what else is
    chosen. Raises ``RefusedError`` for a level that
    layout or model cannot keep, and for a step kind that the device cannot run; ``UsageError`` for recorded steps
    that tell seldom, and where ranks train other parameters than each other; on layers of an open job what that one's
    ``equalise`` raises.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        layout: Mapping[str, int],
        world: World,
        level: str,
        batch_size: int,
        shards: int = DEFAULT_SHARDS,
        status: Status | None = None,
        step_kind: str = DEFAULT_KIND,
        trains: bool = True,
        telling: Telling = EACH_STEP,
        settings: Settings = AS_IT_IS,
    ) -> None:
        job = settings.on(job)
        check_level(layout, level, shards)
        check_step_kind(layout, step_kind)
        check_model(job, model, layout, level, batch_size, shards, trains)
        self.job = job
        self.layout = dict(layout)
        self.level = level
        self.settings = settings
        self._is_main = world.is_main
        self._warned: list[str] = []
        self._level = level_of(level)
        self.device = torch.device(world.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.precision = precision_of(job.precision)
        whole = partial(why_whole, job, model, layout, level, batch_size, shards)
        self.memory = Memory(job, model, self.device, world.rank, level, shards, trains, whole)
        with self.memory.explains("start"):
            self.model = begin_training(cast(model, self.precision.floating).to(self.device))
        self.status = Status() if status is None else status
        self.mesh = Mesh(layout, world.rank, world.size, self.status.waiting, world.groups)
        self.part = Part(
            job,
            self.model,
            self.device,
            level,
            self._level.global_statistics,
            shards,
            self.mesh.world,
            telling,
            beside=open_jobs(self.model),
        )
        try:
            self.part.opened.enter_context(self.precision.flags(self.device))
            self.part.opened.enter_context(settings.in_torch(self.model, self.device))
            self.part.opened.enter_context(buffers_kept(self.model))
            if trains:
                # Evaluation uses no statistics of its batches.
                self.part.opened.enter_context(opened(OpenJob(level, self.model, self.equalise)))
            pieces = self._fold(step_kind)
            cut = self._level.cut(job, self.part.shares, -(-batch_size // self.part.shares), shards)
            self._scripted = scripted(self.model) if cut is not None else []
            self.part.notes += hooked_layers(self.model, cut) if trains else []
            # Modes are set by now.
            check_scripted(self._scripted, trains)
            with self.memory.explains("start"):
                self.optimizer: torch.optim.Optimizer = settings.prefer(make_optimizer(job, self.model))
                # A schedule changes some of them when it is made.
                self.options_made = options_by_name(self.optimizer, own_parameters(self.model).items())
                self._step = self._level.open(self.part, self.optimizer)
            self._step.cut = None if cut is None else (cut, level)
            self._lengths = Lengths(self._step.rule.doubts)
            self._evaluation = Evaluation(self._step, self.part, self.status)
            self._since = SinceThen(self.model)
            if self._step.kept is not None:
                self.part.opened.callback(self._step.kept.close)
            self._runner: Runner = open_kind(step_kind, self._step, self.part.opened, settings, pieces)
            self.memory.opened(self._step, self.part.reducer, self._runner)
        except BaseException:
            self.close()
            raise

    def _fold(self, step_kind: str) -> int | None:
        """Give the part its place in the batch, and what the axes make of it. Return the size of pieces in bytes."""
        known = axes()
        for axis, size in self.layout.items():
            if known[axis].splits_batch:
                self.part.place = self.part.place * size + self.mesh.coordinate(axis)
                self.part.shares *= size
                self.part.batch_group = self.mesh.group(axis)
        pieces = piece_bytes(self.settings, self.device, step_kind, self.model, self.part.shares, self.level)
        self.part.bucket_bytes = self.settings.bucket_bytes or pieces
        for axis in sorted(self.layout, key=lambda name: known[name].order):
            known[axis].apply(self.part, self.mesh.group(axis))
        return pieces

    def ask(self, wishes: int) -> None:
        """Tell all other ranks a small whole number with the next step's gradients: see ``Outcome.asked``."""
        self._step.asked = wishes

    @property
    def drew(self) -> bool:
        """Whether this rank's first step drew random numbers for its gradients; ``False`` before it."""
        return bool(self._step.drew)

    @property
    def holds_within(self) -> dict[str, Any] | None:
        """Within what equal bits of this engine hold: see ``bits_hold_within``. ``None`` at other levels."""
        if self.level != "bits":
            return None
        return bits_hold_within(self.device, self.part.shards, self.step_kind, settings=self.settings.named())

    def compare(self, again: bool = False) -> None:
        """Raise ``MispairedError`` where ranks took other steps than the rest: see ``StepCore.compare``."""
        self._step.compare(again)

    def parts(self, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the state that the next step depends on beside the weights: see ``kway.step.state``."""
        return parts_of(self._step, self.model.state_dict(keep_vars=True) if saved is None else saved)

    @property
    def made(self) -> dict[str, str]:
        """What the model has made since it was built, by name: see ``kway.step.made``."""
        return self._step.made()

    @explained("start")
    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint's weights and state. Raises ``UsageError`` where they do not fit."""
        load_parts(self._step, checkpoint)
        self._runner.forget()

    @property
    def step_kind(self) -> str:
        """The arithmetic of steps: see ``kway.step.kinds``."""
        return self._runner.kind

    @property
    def ran(self) -> str:
        """How steps really ran so far: see ``kway.step.kinds``."""
        return self._runner.ran

    @property
    def notices(self) -> list[str]:
        """Lines for the user about how steps run."""
        return [*self._runner.notices, *self.part.notes]

    @property
    def at_the_end(self) -> list[str]:
        """Lines for the user where the run ends here: see ``kway.step.kinds.Runner``, and ``left_out``."""
        return [*self._runner.at_the_end, *self.left_out]

    @property
    def left_out(self) -> list[str]:
        """A line for the user where steps were left out: see ``StepCore.left_out``."""
        return self._step.left_out

    @property
    def doubts(self) -> list[str]:
        """Lines for the user about what may follow the number of devices, once it has run: loss and attributes."""
        return [*self.loss_doubts, *self._step.attribute_doubts]

    @property
    def loss_doubts(self) -> list[str]:
        """Those of ``doubts`` about a loss, or a metric, that may not add up: see ``LossRule``."""
        return list(self._step.rule.doubts)

    def warn(self) -> None:
        """Say each of ``doubts`` once, on rank 0 alone, on standard error."""
        new = [line for line in self.doubts if line not in self._warned]
        self._warned += new
        for line in new if self._is_main else []:
            print(f"kway: warning: {line}", file=sys.stderr, flush=True)

    def unsaved(self) -> list[str]:
        """Return lines for the user, once, about attributes that no checkpoint holds: see ``SinceThen``."""
        return self._since.lines()

    @property
    def rows(self) -> range:
        """The rows of a tally to which this rank adds."""
        shards = self._level.shards(self.part.shards)
        if shards is None:
            return range(self.part.place, self.part.place + 1)
        return range(*bounds(shards, self.part.shares, self.part.place))

    @property
    def schedule(self) -> Any:
        """The scheduler of the optimizer, or ``None``."""
        return self._step.schedule

    def step(self, share: Share, step: int, tally: Tally | None = None) -> Outcome:
        """Take one optimizer step over the global batch, of which ``share`` is this rank's part.

        Raises what model and loss raise; ``RefusedError`` for blocks that cannot be computed again, ``UsageError`` for
        a batch too small for its statistics.
        """
        # A loop may change modes between steps.
        check_scripted(self._scripted)
        try:
            with self.memory.explains("step", share), self.part.taking(self._step):
                outcome = self._runner.run(share, step, tally)
        except Exception as error:
            told = not_again(error, self.model) or without_statistics(error, share.total)
            if told is None:
                raise
            raise told from error
        self._since.settle(self.model)
        return outcome

    def draw_alike(self, step: int) -> None:
        """Let what follows ``step`` steps draw the same numbers on all ranks, however the last one was taken."""
        # Not by what the step left: one that was recorded draws without the host.
        seed_generators(key(self.job.seed, "between", step), self.device)

    def tally(self, names: list[str]) -> Tally:
        """Make an empty tally on this rank's device."""
        rows = self._level.shards(self.part.shards) or self.part.shares
        return Tally(names, self.device, rows, self._step.rule.doubts, self._lengths)

    def loader(self, parts: Parts, workers_named: bool = True) -> Loader:
        """Make a loader of this rank's shares of ``parts``. ``workers_named``: whether the user said how many."""
        loader = Loader(
            parts,
            rank=self.part.place,
            size=self.part.shares,
            seed=self.job.seed,
            micro_batch=self.job.micro_batch,
            shards=self._level.shards(self.part.shards),
            compare=self._compare,
            device=self.device,
            workers_named=workers_named,
        )
        return self.memory.fed(loader)

    def _compare(self, number: int) -> list[int]:
        """Return the number that each rank of the batch gave, in rank order. A collective."""
        own = torch.tensor(number, dtype=torch.int64, device=self.device)
        return list(self.part.batch_group.stack(own).tolist())

    def cut(self, parts: Parts, indices: Indices, epoch: int, step: int) -> Share:
        """Read this rank's share of one global batch, given by its data set indices."""
        return cut(
            parts,
            indices,
            epoch=epoch,
            step=step,
            rank=self.part.place,
            size=self.part.shares,
            seed=self.job.seed,
            micro_batch=self.job.micro_batch,
            shards=self._level.shards(self.part.shards),
        )

    def shapes(self, parts: Parts) -> Shapes:
        """Return what looks at the shapes of shares that ``cut`` reads of ``parts``."""
        return Shapes(parts, self._level.shards(self.part.shards))

    @torch.no_grad()
    @explained("evaluation")
    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return ``loss`` (where there is one) and every metric over all samples, each counted once."""
        sharded = self._level.shards(self.part.shards) is not None
        return self._evaluation.figures(shares, self.tally(["loss", *self.job.metrics]), self.rows, sharded)

    @torch.no_grad()
    @explained("evaluation")
    def outputs(self, shares: Any) -> Generator[tuple[Any, Any], None, None]:
        """Yield (data set indices, output on the CPU) of this rank's part of every batch. To be closed."""
        yield from self._evaluation.outputs(shares)

    def equalise(self) -> list[str]:
        """See that ranks hold the same weights, bring buffers that differ to one value, and return their names.

        A collective. Raises ``ReplicaError`` where weights differ, or shapes or names of weights and buffers, and then
        ``RefusedError`` at level bits, which a buffer that differs breaks; on all ranks.
        """
        for check in self.part.checks:
            check()
        names = [name for equalise in self.part.equalise for name in equalise()]
        if names and self.level == "bits":
            raise RefusedError(
                f"buffer {names[0]!r} differs between devices",
                "exactness bits needs buffers that do not depend on the share a device holds",
                "use exactness math",
            )
        return names

    def averaged(self) -> AbstractContextManager[None]:
        """While open, parameters hold their moving average where the job asks for one (``Job.ema``)."""
        return nullcontext() if self._step.average is None else self._step.average.swapped_in()

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of parameters and buffers by their own names, in one-device shapes, on the CPU. A collective.

        Raises what ``equalise`` does.
        """
        self.equalise()
        state = own_weights(self.model, self.model.state_dict())
        return {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the optimizer's tensors and numbers as ``NAME/KEY``, dense tensors on the CPU."""
        return held_state(self.optimizer, dict(self.model.named_parameters()))

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``state`` and ``optimizer_state`` gave. What the optimizer holds beyond it is dropped, and
        a moving average of the weights begins anew.
        """
        load_own_weights(self.model, state, "handed to the engine")
        if self._step.average is not None:
            self._step.average.restart()
        if load_state(self.optimizer, dict(self.model.named_parameters()), optimizer):
            self._runner.forget()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return copies of the gradients of the last step by parameter name, on the CPU."""
        found = self.model.named_parameters()
        return {name: dense(p.grad.detach()).cpu().clone() for name, p in found if p.grad is not None}

    def close(self) -> None:
        """Give the model back as it was wrapped: plain layers, no hooks."""
        self.part.opened.close()
