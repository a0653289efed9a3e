"""An engine over a copy of the model: what tries or times steps leaves the user's own objects as they are."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kway.checkpoints.names import own_weights
from kway.data.parts import Parts
from kway.job import Job
from kway.launch.status import Status
from kway.records import Plan
from kway.step.build import build
from kway.step.made import add_made, made_since, names_of
from kway.step.reach import reached
from kway.step.seeds import preserved
from kway.step.settings import Settings
from kway.step.telling import EACH_STEP, Telling
from kway.strategies.engine import Engine
from kway.training.own_contents import entries
from kway.training.own_functions import copies, of_process
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

    Together: what one knows of another it knows of its copy, also where it is a function that knows it. A model that
    cannot be copied is made again, where the job makes it; what its functions know then stays as it is. Raises what
    keeps ``copy.deepcopy`` from it.
    """
    names = ("loss", "penalty", "inputs", "target")
    beside = {**{name: getattr(job, name) for name in names}, "metrics": dict(job.metrics)}
    memo = of_process()
    memo |= entries((model, beside), memo)
    try:
        new, own = copies((model, beside), dict(memo), [model])
    except Exception:
        if isinstance(job.model, nn.Module):
            raise
        new = _made_again(model, job)
        known = {id(each): each for each in reached([new])} | _counterparts(model, new)
        (own,) = copies((beside,), memo | known)
    return new, own


def _made_again(model: nn.Module, job: Job) -> nn.Module:
    """Return what the job makes, as it made ``model``, with the state that this one has now."""
    again, state = build(job), model.state_dict()
    add_made(again, own_weights(model, state), made_since(names_of(again), model))
    held = dict([*model.named_parameters(), *model.named_buffers()])
    for name, new in [*again.named_parameters(), *again.named_buffers()]:
        if not is_lazy(held[name]):
            # Where the first one was cast, or moved to a device.
            new.data = new.data.to(held[name])
    again.load_state_dict(state)
    for own, each in zip(model.modules(), again.modules(), strict=True):
        each.training = own.training
    for before, new in zip(model.parameters(), again.parameters(), strict=True):
        new.requires_grad_(before.requires_grad)
    return again


def _counterparts(model: nn.Module, again: nn.Module) -> dict[int, Any]:
    """Return by id what takes the place of the parts of ``model`` for who knows them."""
    pairs = [
        *zip(model.modules(), again.modules(), strict=True),
        *zip(model.parameters(), again.parameters(), strict=True),
        *zip(model.buffers(), again.buffers(), strict=True),
    ]
    return {id(own): new for own, new in pairs}
