"""A run that has ended, as its record."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from kway.data.loader import Loader
from kway.records import Training
from kway.strategies.engine import Engine
from kway.training.clock import StepClock
from kway.training.growing import scale_facts
from kway.training.saving import Saver
from kway.training.spec import TrainSpec
from kway.training.straggler import own_work, slow_ranks
from kway.training.surroundings import gpu_name, machine, peak_memory, versions
from kway.training.validation import Validation
from kway.training.weights import fingerprint, unique_names
from kway.world import World


@dataclass(frozen=True)
class Ended:
    """What a loop leaves after its last step, on one rank.

    ``resumed``: the step that it went on from; ``rows``: what each epoch gave; ``subject``: what the record says of the
    job; ``weights`` and ``average`` as they are saved; ``notices``: lines for the user, twice perhaps; ``begun``: when
    the run began, of ``time.perf_counter()``.
    """

    spec: TrainSpec
    world: World
    engine: Engine
    loader: Loader
    clock: StepClock
    saver: Saver
    validation: Validation | None
    steps: int
    resumed: int | None
    rows: list[dict[str, Any]]
    subject: dict[str, Any]
    weights: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor] | None
    notices: Sequence[str]
    begun: float

    def record(self) -> Training:
        """Return the record, the same on all ranks. A collective."""
        job, plan, validation = self.spec.job, self.spec.plan, self.validation
        names = unique_names(self.engine.model)
        works = self.engine.mesh.world.objects(self.clock.work())
        timeline, said = self.clock.timeline()
        notices = [*self.notices, *self.engine.at_the_end, *slow_ranks(works), *said]
        gpus = self.engine.mesh.world.objects(gpu_name(self.engine.device))
        return Training(
            model=job.title,
            strategy=plan.strategy,
            devices=plan.devices,
            device_set=plan.device_set,
            layout=plan.layout,
            exactness=plan.exactness,
            holds_within=self.engine.holds_within,
            step_kind=self.engine.ran,
            precision=job.precision,
            batch_size=self.loader.parts.order.batch_size,
            seed=job.seed,
            steps=self.steps,
            resumed_from_step=self.resumed,
            predicted_step_s=None,
            measured_step_s=self.clock.step_s,
            input_wait_s=self.clock.input_wait_s,
            peak_memory_bytes=self.engine.mesh.world.objects(peak_memory(self.engine.device)),
            own_work_s=own_work(works),
            weights_sha256=fingerprint(self.weights, names),
            stopped_early=validation is not None and bool(validation.stopped),
            checkpoints=self.saver.summary(),
            ema=job.ema,
            ema_sha256=None if self.average is None else fingerprint(self.average, names),
            epochs=self.rows,
            best=None if validation is None else validation.best,
            notices=list(dict.fromkeys(notices)),
            versions=versions(),
            job=self.subject,
            machine=machine(gpus, threads=self.world.threads),
            settings=plan.settings,
            tuned=self.spec.tuned,
            processes=self.world.processes,
            timeline=timeline,
            lr_scale=scale_facts(self.spec, self.engine.schedule),
            started=self.spec.started or datetime.now(UTC).isoformat(timespec="seconds"),
            wall_s=time.perf_counter() - self.begun,
        )
