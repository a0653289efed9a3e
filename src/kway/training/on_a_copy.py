"""An engine over a copy of the model: what tries or times steps leaves the user's own objects as they are."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kway.data.parts import Parts
from kway.job import Job
from kway.launch.status import Status
from kway.records import Plan
from kway.step.seeds import preserved
from kway.step.settings import Settings
from kway.step.telling import EACH_STEP, Telling
from kway.strategies.engine import Engine
from kway.training.parts import training_parts
from kway.world import World


def open_on_copy(
    job: Job,
    model: nn.Module,
    plan: Plan,
    world: World,
    status: Status,
    opened: ExitStack,
    *,
    telling: Telling = EACH_STEP,
    around: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
) -> tuple[Engine, Parts]:
    """Open an engine over a copy of ``model``; return it, and the parts of the job's training data.

    ``opened`` closes it, and gives the process its random state back. ``around``: what is open over the copy meanwhile.
    """
    # One that ends with the run would not bear as many steps.
    job = replace(job, schedule=None)
    model, own = copied(model, job)
    job = replace(job, **own)
    parts = training_parts(replace(job, validation=None))[0]
    opened.enter_context(preserved(torch.device(world.device)))
    if around is not None:
        opened.enter_context(around(model))
    engine = Engine(
        job,
        model,
        plan.layout,
        world,
        plan.exactness,
        parts.order.batch_size,
        plan.shards,
        status,
        plan.step_kind,
        telling=telling,
        settings=Settings.of(plan.settings),
    )
    opened.callback(engine.close)
    return engine, parts


def copied(model: nn.Module, job: Job) -> tuple[nn.Module, dict[str, Any]]:
    """Return copies of the model, and of what of the user's is called beside it: it may count, or keep what it saw.

    Together: what one knows of another it knows of its copy. Functions stay what they are.
    """
    names = ("loss", "penalty", "inputs", "target")
    beside = {**{name: getattr(job, name) for name in names}, "metrics": dict(job.metrics)}
    with torch.no_grad():
        # With gradients, scripted layers would copy their parameters as results of something.
        made: tuple[nn.Module, dict[str, Any]] = copy.deepcopy((model, beside))
    for own, new in zip(model.parameters(), made[0].parameters(), strict=True):
        new.requires_grad_(own.requires_grad)
    return made
