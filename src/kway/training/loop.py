"""The training loop of one rank. All ranks run it in step; rank 0 speaks and writes."""

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import kway
from kway.data.parts import Parts, take_apart
from kway.job import Job
from kway.records import Training
from kway.step.deterministic import bits_hold_within
from kway.step.tally import Tally, mean
from kway.strategies.engine import Engine
from kway.training.clock import StepClock
from kway.training.spec import TrainSpec
from kway.training.watch import LossWatch
from kway.training.weights import fingerprint, save_weights, unique_names
from kway.world import World

Emit = Callable[[dict[str, Any]], None]


def training_parts(job: Job) -> tuple[Parts, Parts | None]:
    """Take a job's data apart: (training, validation or ``None``). Raises ``UsageError`` and ``DataError``."""
    train = take_apart(
        job.data, batch_size=job.batch_size, seed=job.seed, shuffle=job.shuffle, workers=job.workers
    )
    if job.validation is None:
        return train, None
    held = take_apart(
        job.validation,
        batch_size=_own_batch(job.validation, train.order.batch_size),
        seed=job.seed,
        shuffle=False,
        workers=job.workers,
    )
    return train, held


def _own_batch(data: Any, default: int) -> int | None:
    return None if isinstance(data, torch.utils.data.DataLoader) else default


@dataclass
class Loop:
    """One rank's run of a training job. ``emit`` takes events, and is called on rank 0 only."""

    world: World
    spec: TrainSpec
    model: nn.Module
    emit: Emit
    rows: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    notices: list[str] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self) -> Training:
        """Train, and return the record (the same on all ranks). Raises what the user's code raises."""
        begun = time.perf_counter()
        spec, job, plan = self.spec, self.spec.job, self.spec.plan
        train, held = training_parts(job)
        self.engine = Engine(
            job, self.model, plan.layout, self.world, plan.exactness, train.order.batch_size, plan.shards
        )
        self.loader = self.engine.loader(train)
        self.held = None if held is None else self.engine.loader(held)
        self.clock, self.watch = StepClock(self.engine.device), LossWatch(self.engine.device)
        self.steps, self.validated_at, self.validation = 0, -1, dict[str, float]()
        try:
            self._say(
                {
                    "event": "start",
                    "epochs": spec.epochs,
                    "steps_per_epoch": self.loader.steps(0),
                    "samples": train.order.samples,
                    "devices": plan.devices,
                    "strategy": plan.strategy,
                }
            )
            for epoch in range(spec.epochs):
                self._epoch(epoch)
                if self.steps == spec.steps:
                    break
            self._notice_buffers(self.engine.equalise())
            self.state = self.engine.state()
            record = self._record(begun)
        finally:
            self.engine.close()
            self.loader.close()
            if self.held is not None:
                self.held.close()
        if self.world.is_main:
            save_weights(self.state, Path(spec.folder) / "weights.safetensors")
        self._say({"event": "end"})
        return record

    def _say(self, event: dict[str, Any]) -> None:
        if self.world.is_main:
            self.emit(event)

    def _epoch(self, epoch: int) -> None:
        tally = self.engine.tally([*self.spec.job.metrics])
        samples, seconds, first = 0, 0.0, self.steps
        self.clock.resume()
        since = self.clock.synchronise()
        for share in self.clock.waited(self.loader.epoch(epoch)):
            outcome = self.engine.step(share, self.steps, tally)
            self.clock.step()
            self.watch.add(epoch + 1, share.step + 1, outcome)
            self.steps += 1
            samples += share.total
            last = self.steps == self.spec.steps
            if self.steps % self.spec.log_every == 0 or last:
                self._log(epoch, share.step, samples, seconds + time.perf_counter() - since)
            if self.spec.validate_every.due(self.steps, None):
                self.clock.pause()
                seconds += self.clock.synchronise() - since
                self._validate(epoch)
                self.clock.resume()
                since = self.clock.synchronise()
            if last:
                break
        self.clock.pause()
        seconds += self.clock.synchronise() - since
        if self.spec.validate_every.due(self.steps, epoch + 1) or self._is_last(epoch):
            self._validate(epoch)
        row = self._row(epoch, self.steps - first, samples, seconds, tally)
        self.rows.append(row)
        self._say({"event": "epoch", **row})

    def _is_last(self, epoch: int) -> bool:
        return self.steps == self.spec.steps or epoch == self.spec.epochs - 1

    def _log(self, epoch: int, step: int, samples: int, seconds: float) -> None:
        self.watch.check()
        self._say(
            {
                "event": "step",
                "epoch": epoch + 1,
                "step": step + 1,
                "steps": self.loader.steps(epoch),
                "loss": self.watch.last,
                "samples": samples,
                "seconds": seconds,
            }
        )

    def _validate(self, epoch: int) -> None:
        """Evaluate, once for each number of steps; decide from the same numbers on all ranks."""
        self.watch.check()
        if self.held is None or self.validated_at == self.steps:
            return
        self.validated_at = self.steps
        self._notice_buffers(self.engine.equalise())
        values = self.engine.evaluate(self.held.epoch(0))
        self.validation = {"validation_loss": values.pop("loss"), **values}
        self._say({"event": "validation", "epoch": epoch + 1, "step": self.steps, **self.validation})
        schedule = self.engine.schedule
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(self.validation["validation_loss"])
        self._keep_best(epoch)

    def _keep_best(self, epoch: int) -> None:
        name = self.spec.save_best
        if name is None:
            return
        value = self.validation[name]
        smaller_is_better = name.endswith("loss")
        if self.best is not None:
            before = self.best["value"]
            better = value < before if smaller_is_better else value > before
            if not (better or math.isnan(before)):
                return
        self.best = {"metric": name, "value": value, "epoch": epoch + 1, "step": self.steps}
        state = self.engine.state()
        if self.world.is_main:
            save_weights(state, Path(self.spec.folder) / "best.safetensors")

    def _row(self, epoch: int, steps: int, samples: int, seconds: float, tally: Tally) -> dict[str, Any]:
        metrics = tally.result(self.engine.part.batch_group)
        rate = self.engine.optimizer.param_groups[0]["lr"]
        return {
            "epoch": epoch + 1,
            "steps": steps,
            "samples": samples,
            "train_loss": self.watch.epoch_mean(),
            **{f"train_{name}": mean(pair) for name, pair in metrics.items()},
            **(self.validation if self.validated_at == self.steps else {}),
            "seconds": seconds,
            "samples_per_s": samples / seconds if seconds else 0.0,
            "lr": float(rate),
        }

    def _notice_buffers(self, names: list[str]) -> None:
        if names:
            text = (
                f"buffers that differed between devices were brought to one value (mean of floats, else the "
                f"first device's): {', '.join(names)}"
            )
            if text not in self.notices:
                self.notices.append(text)

    def _holds_within(self) -> dict[str, Any] | None:
        """Say within what the bits of this run hold; nothing at other levels."""
        if self.spec.plan.exactness != "bits":
            return None
        return bits_hold_within(self.engine.device, self.spec.plan.shards)

    def _record(self, begun: float) -> Training:
        job, plan = self.spec.job, self.spec.plan
        notices = [*self.loader.parts.notices, *(self.held.parts.notices if self.held else []), *self.notices]
        return Training(
            model=job.title,
            strategy=plan.strategy,
            devices=plan.devices,
            device_set=plan.device_set,
            layout=plan.layout,
            exactness=plan.exactness,
            holds_within=self._holds_within(),
            step_kind="eager",
            precision=job.precision,
            batch_size=self.loader.parts.order.batch_size,
            seed=job.seed,
            steps=self.steps,
            resumed_from_step=None,
            predicted_step_s=None,
            measured_step_s=self.clock.step_s,
            input_wait_s=self.clock.input_wait_s,
            peak_memory_bytes=self.engine.mesh.world.objects(peak_memory(self.engine.device)),
            weights_sha256=fingerprint(self.state, unique_names(self.model)),
            epochs=self.rows,
            best=self.best,
            notices=list(dict.fromkeys(notices)),
            versions=versions(),
            started=self.spec.started or datetime.now(UTC).isoformat(timespec="seconds"),
            wall_s=time.perf_counter() - begun,
        )


def peak_memory(device: torch.device) -> int:
    """Return the most memory in bytes: allocated on a GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "kway": kway.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
