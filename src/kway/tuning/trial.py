"""One choice tried on the real step: opened like a run, stepped over the run's own batches, timed, closed."""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kway.comm.group import Group
from kway.data.loader import Share
from kway.data.parts import Parts
from kway.errors import KwayError, UsageError
from kway.job import Job
from kway.launch.status import Status
from kway.records import Plan
from kway.step.kinds import KINDS
from kway.step.seeds import preserved
from kway.step.settings import OPTIMIZER_FORMS, Settings, takes_form
from kway.step.tally import Tally
from kway.strategies.engine import Engine
from kway.training.parts import training_parts
from kway.tuning.agreement import Standard, Trace, standard
from kway.tuning.knobs import JOB, SETTINGS, Choice
from kway.tuning.search import Reading
from kway.world import World

WINDOWS = 5
# Seconds of a window at least, and steps: a shorter one would time the clock.
WINDOW_S, MOST_STEPS = 0.15, 200
ORDERS = 3


def applied(choice: Choice, job: Job, plan: Plan) -> tuple[Job, Plan]:
    """Return job and plan as a choice wants them."""
    own = {name: value for name, value in choice.items() if name in JOB}
    settings = {**plan.settings, **{name: value for name, value in choice.items() if name in SETTINGS}}
    kind = choice.get("step_kind", plan.step_kind)
    return replace(job, **own), replace(plan, step_kind=kind, settings=settings)


@dataclass
class Trials:
    """Tries choices of one job on this rank; all ranks of ``group`` make the same calls.

    ``world``: where engines stand, alone at level bits. ``model``: as the run would begin with it.

    ``compared``: the first steps, of which the numbers are compared; each compared step is of another batch.
    """

    world: World
    group: Group
    job: Job
    plan: Plan
    model: nn.Module
    status: Status
    compared: int = 6
    standards: dict[str, Standard] = field(default_factory=dict)
    waits: float = 0.0
    attends: bool = False
    forms: tuple[str, ...] = ()
    _step_s: float = 0.0

    def __post_init__(self) -> None:
        """Keep the user's loss out of it: a module may count."""
        self.device = torch.device(self.world.device)
        if isinstance(self.job.loss, nn.Module):
            self.job = replace(self.job, loss=copy.deepcopy(self.job.loss))

    def prepare(self, enough: Callable[[float], bool]) -> bool:
        """Take the compared steps as they are, to compare with; return whether it was worth it. A collective.

        ``enough`` is asked, with the seconds of a step, whether there is time for the rest: some
        ``steps_before_first`` steps. Raises what the user's code raises.
        """
        found = self._standard(self.job.precision, enough)
        if found is not None:
            self.standards[self.job.precision] = found
        return found is not None

    @property
    def steps_before_first(self) -> int:
        """How many steps are taken before the first candidate is, at least, when one trace is there."""
        return (ORDERS + 1) * self.compared + 4 + 2 * WINDOWS

    def measure(self, choice: Choice) -> Reading:
        """Try a choice. What cannot run, or does not agree, says so in the reading. A collective."""
        begun = time.perf_counter()
        try:
            reading = self._tried(choice)
        except UsageError as error:
            reading = Reading(refused=error.got)
        except (KwayError, RuntimeError, NotImplementedError) as error:
            reading = Reading(
                refused=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        all_ = self.group.objects((reading, time.perf_counter() - begun))
        return _slowest([own for own, _ in all_], max(seconds for _, seconds in all_))

    def _tried(self, choice: Choice) -> Reading:
        precision = str(choice.get("precision", self.job.precision))
        if precision not in self.standards:
            found = self._standard(precision, lambda _: True)
            assert found is not None
            self.standards[precision] = found
        with ExitStack() as opened:
            begun = time.perf_counter()
            engine, shares = self._open(choice, opened)
            trace = self._trace(engine, shares)
            # Recorded steps have been recorded by now.
            _take(engine, shares, 2, self.compared)
            made = self._synchronised() - begun
            windows, waits = self._windows(engine, shares)
            if not choice:
                self.waits = waits
        difference = self.standards[precision].difference(trace)
        return Reading(tuple(windows), made_s=made, difference=difference)

    def _open(self, choice: Choice, opened: ExitStack, shares: bool = True) -> tuple[Engine, Iterator[Share]]:
        job, plan = applied(choice, self.job, self.plan)
        parts = self._parts(job)
        opened.enter_context(preserved(self.device))
        engine = Engine(
            job,
            copy.deepcopy(self.model),
            plan.layout,
            self.world,
            plan.exactness,
            parts.order.batch_size,
            plan.shards,
            self.status,
            plan.step_kind,
            settings=Settings.of(plan.settings),
        )
        opened.callback(engine.close)
        if not shares:
            return engine, iter(())
        loader = engine.loader(parts)
        opened.callback(loader.close)
        return engine, _whole(loader, parts.order.batch_size)

    def _parts(self, job: Job) -> Parts:
        return training_parts(replace(job, validation=None))[0]

    def _trace(self, engine: Engine, shares: Iterator[Share]) -> Trace:
        """Take the compared steps and return what they left."""
        tally = _tally(engine)
        steps = zip(range(self.compared), shares, strict=False)
        outcomes, since = [], time.perf_counter()
        for step, share in steps:
            outcomes.append(engine.step(share, step, tally))
            if step == 0 and self.compared > 1:
                # The first one pays for what happens once.
                since = self._synchronised()
        losses = tuple(float(outcome.loss) for outcome in outcomes)
        self._step_s = (time.perf_counter() - since) / max(1, self.compared - 1)
        tensors = {name: value.detach().to("cpu", copy=True) for name, value in engine.state().items()}
        for name, parameter in engine.model.named_parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                tensors[f"gradient of {name}"] = parameter.grad.detach().to("cpu", copy=True)
        return Trace(losses, tensors)

    def _standard(self, precision: str, enough: Callable[[float], bool]) -> Standard | None:
        """Take the compared steps as they are, at one precision, over the batches and over them in other orders.

        ``None`` where ``enough`` says after the first ones that there is no time for the others.
        """
        traces = []
        own = {} if precision == self.job.precision else {"precision": precision}
        parts = self._parts(self.job)
        steps = parts.order.steps(0)
        assert steps is not None
        for order in range(1 + ORDERS):
            drawn = np.random.default_rng(order)
            with ExitStack() as opened:
                engine, _ = self._open(own, opened, shares=False)
                whole = [
                    parts.order.batch(0, step)
                    for step in range(steps)
                    if len(parts.order.batch(0, step)) == parts.order.batch_size
                ]
                batches = [whole[step % len(whole)] for step in range(self.compared)]
                shares = (
                    engine.cut(parts, drawn.permutation(batch) if order else batch, 0, step)
                    for step, batch in enumerate(batches)
                )
                with _Calls(F.scaled_dot_product_attention) as calls:
                    traces.append(self._trace(engine, shares))
                self.attends |= calls.seen
                self.forms = tuple(form for form in OPTIMIZER_FORMS if takes_form(engine.optimizer, form))
            if not order and not enough(self.group.objects(self._step_s)[0]):
                return None
        return standard(traces[0], traces[1:], precision)

    def _windows(self, engine: Engine, shares: Iterator[Share]) -> tuple[list[float], float]:
        """Return seconds a step of each window, and the part of them in which this rank waited for input."""
        step = self.compared + 2
        begun = self._synchronised()
        _take(engine, shares, 2, step)
        one = self.group.objects((self._synchronised() - begun) / 2)[0]
        steps = min(MOST_STEPS, max(2, round(WINDOW_S / max(one, 1e-6))))
        step += 2
        windows, waited = [], 0.0
        for _ in range(WINDOWS):
            self.group.barrier()
            begun = self._synchronised()
            waited += _take(engine, shares, steps, step)
            windows.append((self._synchronised() - begun) / steps)
            step += steps
        return windows, waited / max(1e-9, sum(windows) * steps)

    def _synchronised(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _take(engine: Engine, shares: Iterator[Share], steps: int, first: int) -> float:
    """Take some steps; return the seconds in which the host waited for batches."""
    tally, waited = _tally(engine), 0.0
    for step in range(first, first + steps):
        since = time.perf_counter()
        share = next(shares)
        waited += time.perf_counter() - since
        engine.step(share, step, tally)
    return waited


def _tally(engine: Engine) -> Tally:
    return engine.tally([*engine.job.metrics])


def _whole(loader: Any, batch_size: int) -> Iterator[Share]:
    """Pass on the shares of whole batches, epoch after epoch."""
    for epoch in count():
        for share in loader.epoch(epoch):
            if share.total == batch_size:
                yield share


def _slowest(readings: list[Reading], cost_s: float) -> Reading:
    """Join the readings of ranks: a window lasts as long as on the slowest; what one refuses is refused."""
    refused = next((one.refused for one in readings if one.refused), "")
    difference = next((one.difference for one in readings if one.difference), "")
    if refused:
        return Reading(refused=refused, cost_s=cost_s)
    windows = tuple(max(each) for each in zip(*(one.step_s for one in readings), strict=True))
    return Reading(windows, cost_s, max(one.made_s for one in readings), difference)


class _Calls(TorchFunctionMode):
    """Sees whether a function of torch is called while open, under whatever name."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function, self.seen = function, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func is self._function
        return func(*args, **(kwargs or {}))


def compiles(choice: Choice, plan: Plan) -> bool:
    """Whether a choice goes through torch.compile."""
    return KINDS[choice.get("step_kind", plan.step_kind)].compiles
