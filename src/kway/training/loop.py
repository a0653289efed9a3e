"""The training loop of one rank. All ranks run it in step; rank 0 speaks and writes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from kway.checkpoints.reading import open_checkpoint
from kway.data.loader import Loader
from kway.data.parts import Parts
from kway.data.streams import StreamOrder
from kway.launch.status import Status
from kway.records import Training
from kway.step.kinds import kind_of
from kway.step.scaling import waits_for_figure
from kway.step.settings import Settings
from kway.step.tally import mean
from kway.step.telling import Telling, seldom_where_it_costs
from kway.strategies.engine import Engine
from kway.training.began import check_options
from kway.training.beginning import check_schedule, start_of, too_few_steps, too_many_steps
from kway.training.best import bring_best
from kway.training.course import Course
from kway.training.due import NOTHING, Agenda
from kway.training.ended import Ended
from kway.training.facts import check_within, earlier_ways, other_masks, resumed_notices
from kway.training.fading import fading
from kway.training.growing import growth_lines
from kway.training.held import Stop
from kway.training.noted import noted_changes, noted_of
from kway.training.parts import training_parts
from kway.training.recording import clock_of
from kway.training.requests import STOP, Requests, who_asked
from kway.training.saving import Position, Saver
from kway.training.set_up import set_up_notices
from kway.training.spec import TrainSpec
from kway.training.subject import optimizer_facts
from kway.training.validation import BEST, Validation
from kway.training.watch import LossWatch
from kway.training.weights import save_last
from kway.world import StopRequest, World

Emit = Callable[[dict[str, Any]], None]


@dataclass
class Loop:
    """One rank's run of a training job. ``emit`` takes events, and is called on rank 0 only.

    ``stop``: where it is set, all ranks stop after one step and leave a checkpoint. ``told_every``: in one of how many
    steps ranks compare their collectives (``None``: as seldom as that costs something), and before numbers are used.
    """

    world: World
    spec: TrainSpec
    model: nn.Module
    emit: Emit
    stop: StopRequest = field(default_factory=StopRequest)
    status: Status = field(default_factory=Status)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    # What is of this run alone: of how it goes on, say, which is nothing to one that goes on from it later.
    own_notices: list[str] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    average: dict[str, torch.Tensor] | None = None
    unsaid: list[str] = field(default_factory=list)
    told_every: int | None = None

    def run(self) -> Training:
        """Train, and return the record (the same on all ranks). Raises what the user's code raises."""
        begun = time.perf_counter()
        spec, job, plan = self.spec, self.spec.job, self.spec.plan
        train, held = training_parts(job)
        self.noted = noted_of(job, self.model, held, spec)
        records = kind_of(plan.step_kind).records
        # What follows the step about to be taken.
        self.due = NOTHING
        told_every = self.told_every or seldom_where_it_costs(torch.device(self.world.device), records)
        self.engine = Engine(
            job,
            self.model,
            plan.layout,
            self.world,
            plan.exactness,
            train.order.batch_size,
            plan.shards,
            self.status,
            plan.step_kind,
            telling=Telling(told_every, self._looks_after),
            settings=Settings.of(plan.settings),
        )
        self.engine.memory.adapts = self.world.origin not in ("env", "threads")
        # As it begins: a schedule changes the rate later.
        self.subject = {**spec.subject, "optimizer": optimizer_facts(self.engine.optimizer)}
        self.loader = self._loader(train)
        self.validation = None if held is None else self._open(self._loader(held))
        self.agenda = Agenda(spec, self.loader.steps)
        self.clock = clock_of(spec, self.world, self.engine.mesh.world, self.engine.device, self.status)
        self.watch = LossWatch(self.engine.device, compare=self.engine.compare)
        self.steps = self.epoch = 0
        self.course: Course | None = None
        self.requests = Requests(self.engine.device)
        self.saver = Saver(self.engine, spec, self.world.is_main, self.noted)
        try:
            self.saver.check()
            foreseen = self._begin(train)
            # An epoch that was begun is ended, though the run has taken all its steps.
            while self.epoch < spec.epochs and (self.course is not None or not self._is_over()):
                self._epoch(self.epoch)
            self.own_notices += [] if foreseen or self._is_over() else too_few_steps(spec, self.steps)
            self.status.at("save")
            self._notice_buffers(self.engine.equalise())
            self.state = self.engine.state()
            if job.ema is not None:
                with self.engine.averaged():
                    self.average = self.engine.state()
            if self.saver.is_on and self.saver.at != self.steps:
                self._save(Position(self.steps, self.epoch, 0))
            for line in self.saver.close():
                self._warn(line)
            record = Ended(
                spec=spec,
                world=self.world,
                engine=self.engine,
                loader=self.loader,
                clock=self.clock,
                saver=self.saver,
                validation=self.validation,
                steps=self.steps,
                resumed=self.resumed,
                rows=self.rows,
                subject=self.subject,
                weights=self.state,
                average=self.average,
                notices=[*self._set_up(), *self.engine.doubts, *self._all_notices],
                begun=begun,
            ).record()
        except Exception:
            # A second signal and Ctrl-C are none of these: they wait for no disk.
            self.saver.close()
            raise
        finally:
            self.clock.close()
            self.engine.close()
            self.loader.close()
            if self.validation is not None:
                self.validation.held.close()
        if self.world.is_main:
            self._keep_weights(Path(spec.folder))
        self._say({"event": "end"})
        return record

    def _loader(self, parts: Parts) -> Loader:
        tuned = (self.spec.tuned or {}).get("choice", {})
        return self.engine.loader(parts, workers_named="workers" not in tuned)

    @property
    def _all_notices(self) -> list[str]:
        return [*self.own_notices, *self.notices]

    def _begin(self, train: Parts) -> list[str]:
        """Go on from where the run is to; say what is known before the first step; return what it lacks in steps."""
        self.resumed = self._resume()
        foreseen = too_many_steps(self.spec, train)
        check_schedule(self.spec, train, self.engine.schedule)
        self.own_notices += [*foreseen, *fading(self.spec, train, self.engine.schedule)]
        steps, kind = self.loader.steps(0), self.engine.step_kind
        self._say(start_of(self.spec, train, steps, self.resumed, self.subject, kind))
        for line in dict.fromkeys([*self.spec.told, *self._set_up(), *self._all_notices]):
            self._say({"event": "notice", "text": line})
        return foreseen

    def _keep_weights(self, folder: Path) -> None:
        """Write the last weights. Raises ``KwayError`` that says what is there where they cannot be written."""
        try:
            save_last(folder, self.state, self.average, self.spec.made | self.engine.made)
        except OSError as error:
            raise self.saver.no_weights(self.steps, error) from None

    def _open(self, held: Loader) -> Validation:
        if self.spec.job.ema is not None:
            self.notices.append(
                f"validation figures are of the moving average of the weights (ema={self.spec.job.ema:g}); "
                "running statistics are the model's own"
            )
        return Validation(self.engine, held, self.spec, self.world.is_main, self._notice_buffers, self._warn)

    def _set_up(self) -> list[str]:
        """Return lines for the user about the data and how steps run, known so far on any rank. A collective."""
        held = [] if self.validation is None else [self.validation.held]
        # Later a schedule has changed the rates.
        self.notices += growth_lines(self.spec, self.engine.optimizer, self.engine.schedule)
        return set_up_notices(self.engine, self.loader, *held)

    def _warn(self, text: str) -> None:
        self.notices.append(text)
        self._say({"event": "warning", "text": text})

    def _say(self, event: dict[str, Any]) -> None:
        if self.world.is_main:
            self.emit(event)

    def _epoch(self, epoch: int) -> None:
        course = self.course or Course(self.engine.tally([*self.spec.job.metrics]))
        self.course = course
        self.clock.resume()
        course.since = self.clock.synchronise()
        shares = iter(()) if self._is_over() else self.loader.epoch(epoch, course.step)
        for share in self.clock.waited(shares, self.steps):
            wishes = self._wishes()
            self.engine.ask(wishes)
            self.due = self.agenda.after_step(epoch, share.step, self.steps + 1)
            outcome = self.engine.step(share, self.steps, course.tally)
            if self.spec.warns:
                self.engine.warn()
            if self.unsaid:
                # Only a model that draws: the step shows it.
                self.own_notices += self.unsaid if self.engine.drew else []
                self.unsaid = []
            self.clock.step(share.count)
            self.watch.add(epoch + 1, share.step + 1, outcome)
            self.steps += 1
            course.step, course.taken = share.step + 1, course.taken + 1
            course.samples += share.total
            if self.due.logs:
                self._log(epoch, share.step, course)
            self._between(epoch, course, self.requests.after(outcome, wishes))
            if self._is_over():
                break
        self.clock.pause()
        course.pause(self.clock.synchronise())
        if self.saver.is_on and self._is_last(epoch) and self.saver.at != self.steps:
            # Before what is done only because it is the last: a run that is asked for more goes on from here.
            self._save(Position(self.steps, epoch, course.step))
        if self.agenda.validates_after(epoch, self.steps) or self._is_last(epoch):
            self._validate(epoch, self._is_last(epoch))
        loss = self.watch.epoch_mean()
        if self.validation is None and waits_for_figure(self.engine.schedule):
            self.engine.schedule.step(loss)
        row = self._row(epoch, course, loss)
        self.rows.append(row)
        at = {"global_step": self.steps} | ({"earlier": True} if self.steps == self.resumed else {})
        self._say({"event": "epoch", **row, **at})
        self.epoch, self.course = epoch + 1, None
        if self.agenda.saves_after(epoch) and not self._is_last(epoch):
            self._save(Position(self.steps, epoch + 1, 0))

    def _between(self, epoch: int, course: Course, asked: int) -> None:
        """Do what is due between two steps. ``asked``: see ``Requests.after``."""
        if self.due.validates:
            self.clock.pause()
            course.pause(self.clock.synchronise())
            self._validate(epoch, self.due.ends)
            self.clock.resume()
            course.since = self.clock.synchronise()
        if self.due.saves or asked:
            # The device is not waited for: what a save asks of the host goes on beside the last steps.
            self.clock.stands()
            stop = self._save(Position(self.steps, epoch, course.step))
            self.clock.leave_out(stop)
            course.stops.append(stop)
            if asked & STOP:
                self._stop()

    def _wishes(self) -> int:
        return self.saver.wish() | (STOP if self.stop.by and self.spec.is_kept else 0)

    def _stop(self) -> NoReturn:
        """Raise ``StoppedError``, of a run that has been saved."""
        # Nobody leaves before the checkpoint is there: one rank's end ends all.
        self.status.at("save")
        why = who_asked(self.engine.mesh.world.objects(self.stop))
        raise self.engine.mesh.world.objects(self.saver.stop(why))[0]

    def _save(self, position: Position) -> Stop:
        """Start to save the run as it stands; return how long that took. A collective."""
        self.status.at("save")
        self.saver.held.begins()
        # First, while a GPU still works through the last steps: what follows waits for it.
        self.saver.prepare(position)
        self._notice_buffers(self.engine.equalise())
        self._notice_attributes()
        course, group = self.course, self.engine.part.batch_group
        watch = self.watch.state()
        run = {
            "rows": self.rows,
            "notices": self.notices,
            "watch": watch,
            "validation": None if self.validation is None else self.validation.state(),
            "course": None if course is None else course.state(self.saver.held.so_far),
            "tally": None if course is None else course.tally.state(group),
        }
        for line in self.saver.save(position, run):
            self._warn(line)
        self._say({"event": "checkpoint", "step": position.steps})
        return self.saver.held.ends()

    def _resume(self) -> int | None:
        """Go on from the checkpoint that was asked for; return its step. Raises ``UsageError`` where it cannot be."""
        if self.spec.resume is None:
            return None
        checkpoint = open_checkpoint(Path(self.spec.resume))
        check_within(checkpoint, self.engine.holds_within)
        check_options(checkpoint, self.saver.began, self.engine.holds_within)
        run = checkpoint.part("run")
        self.engine.restore(checkpoint)
        streams = isinstance(self.loader.parts.order, StreamOrder)
        self.notices += [*run["notices"], *earlier_ways(checkpoint, self.spec.plan)]
        self.own_notices += resumed_notices(checkpoint, streams)
        self.own_notices += noted_changes(checkpoint, self.noted, self.spec.facts)
        self.unsaid = other_masks(checkpoint, self.spec.plan)
        self.steps, self.epoch, self.rows = checkpoint.step, checkpoint.epoch, list(run["rows"])
        self.watch.load(run["watch"])
        if run["course"] is not None:
            tally = self.engine.tally([*self.spec.job.metrics])
            tally.load(run["tally"], self.engine.rows)
            self.course = Course(tally, run["step_of_epoch"], *run["course"])
        # From here on the run is not refused any more, so that something may be written.
        folder = Path(self.spec.folder)
        if self.world.is_main:
            self.own_notices += bring_best(checkpoint, folder)
        if self.validation is not None and run["validation"] is not None:
            there = (folder / BEST).is_file()
            self.validation.load(run["validation"], self.engine.mesh.world.objects(there)[0])
        return self.steps

    def _looks_after(self) -> bool:
        """Whether all there is to know is looked at after the step about to be taken."""
        return self.due.looks

    def _is_over(self) -> bool:
        """Whether the run ends with the step just taken, whatever is left of its epochs."""
        stopped = self.validation is not None and bool(self.validation.stopped)
        return stopped or self.agenda.is_full(self.steps)

    def _is_last(self, epoch: int) -> bool:
        return self._is_over() or self.agenda.is_last(epoch)

    def _log(self, epoch: int, step: int, course: Course) -> None:
        event = {
            "event": "step",
            "epoch": epoch + 1,
            "step": step + 1,
            "global_step": self.steps,
            "steps": self.loader.steps(epoch),
            "samples": course.samples,
            "seconds": course.passed(time.perf_counter()),
        }
        self.watch.tell(lambda loss: self._say({**event, "loss": loss}))

    def _validate(self, epoch: int, at_the_end: bool) -> None:
        """Evaluate, once for each number of steps; decide from the same numbers on all ranks."""
        self.watch.check()
        if self.validation is None or self.validation.at == self.steps:
            return
        with self.status.doing("evaluate"):
            figures = self.validation.judge(epoch, self.steps, at_the_end)
        if self.validation.stopped:
            self.notices.append(self.validation.stopped)
        at = {"epoch": epoch + 1, "step": self.steps, "global_step": self.steps}
        self._say({"event": "validation", **at, **figures})

    def _row(self, epoch: int, course: Course, loss: float) -> dict[str, Any]:
        metrics = course.tally.result(self.engine.part.batch_group)
        validation = self.validation
        held_out = validation.figures if validation is not None and validation.at == self.steps else {}
        figures = {**{f"train_{name}": mean(pair) for name, pair in metrics.items()}, **held_out}
        return course.row(epoch, loss, figures, self.engine.optimizer.param_groups[0]["lr"])

    def _notice_attributes(self) -> None:
        # A run that goes on has it from the one before.
        for line in [line for line in self.engine.unsaved() if line not in self.notices]:
            self.notices.append(line)
            self._say({"event": "notice", "text": line})

    def _notice_buffers(self, names: list[str]) -> None:
        if names:
            text = (
                f"buffers that differed between devices were brought to one value (mean of floats, else the "
                f"first device's): {', '.join(names)}"
            )
            if text not in self.notices:
                self.notices.append(text)
