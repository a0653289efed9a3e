"""The state of a step between two steps of a run: all that the next one depends on beside the weights, by part."""

from collections.abc import Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from kway.checkpoints.loading import load_own_weights
from kway.checkpoints.names import (
    named_as_in,
    own_buffers,
    own_modules,
    own_parameters,
    own_state,
    own_weights,
)
from kway.checkpoints.optimizer import load_by_name, state_by_name
from kway.checkpoints.reading import Checkpoint
from kway.errors import UsageError
from kway.step.core import StepCore
from kway.step.made import add_buffer, add_made
from kway.step.scaling import Scaled

# Parts that only some jobs have. Buffers can appear while a model is used.
OPTIONAL = ("modules", "schedule", "scaler", "ema")
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, partial, type(lru_cache(len)))


def parts_of(step: StepCore, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state by part, as ``checkpoints.state.flatten`` takes it; tensors are the step's own, not copies.

    ``optimizer`` by name; ``buffers`` that are not in the model's ``state_dict``; ``modules``: what modules keep
    beside tensors; ``made``: which weights the model made when it ran; ``weight``: what a sample weighs, see
    ``StepCore.agree``; ``schedule``, ``scaler`` and ``ema`` where the job has them. Argument ``saved``: the model's
    ``state_dict(keep_vars=True)``.
    """
    parts: dict[str, Any] = {"optimizer": state_by_name(step.optimizer, own_parameters(step.model).items())}
    if buffers := _besides(saved, step.model):
        parts["buffers"] = buffers
    if extra := {k: v for k, v in saved.items() if not isinstance(v, torch.Tensor)}:
        parts["modules"] = own_state(step.model, extra)
    if made := step.made(saved):
        parts["made"] = made
    if step.per_sample is not None:
        parts["weight"] = {"per_sample": step.per_sample}
    if step.schedule is not None:
        check_schedule_kept(step.schedule)
        parts["schedule"] = _without_code(step.schedule.state_dict())
    if step.scaler is not None:
        parts["scaler"] = step.scaler.state_dict()
    if step.average is not None:
        parts["ema"] = step.average.state()
    return parts


def _without_code(state: Any) -> Any:
    """Return the state of a schedule without functions and classes that objects it calls (``lr_lambdas``) keep.

    Torch takes all their attributes, as of ``functools.lru_cache`` the function inside. The job brings its own. An
    attribute that holds functions beside what can change stays, and cannot be saved: a part of it would be lost.
    """
    if not isinstance(state, dict):
        return state
    found = dict(state)
    if isinstance(given := found.get("lr_lambdas"), list):
        found["lr_lambdas"] = [
            {name: value for name, value in own.items() if name != "__wrapped__" and not _is_code(value)}
            if isinstance(own, dict)
            else own
            for own in given
        ]
    if isinstance(inner := found.get("_schedulers"), list):
        found["_schedulers"] = [*map(_without_code, inner)]
    if "own" in found:
        # Of one whose rates are scaled.
        found["own"] = _without_code(found["own"])
    return found


def _is_code(value: Any) -> bool:
    """Whether ``value`` is a function or class, or a list, tuple or dict of nothing else."""
    if isinstance(value, list | tuple | dict) and value:
        return all(map(_is_code, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _CODE)


def check_schedule_kept(schedule: Any) -> None:
    """Raise ``UsageError`` for a schedule whose state no checkpoint can hold.

    One that steps is enough to train; what it is at has to be asked for, and given back.
    """
    own = schedule.own if isinstance(schedule, Scaled) else schedule
    for each in [own, *getattr(own, "_schedulers", ())]:
        lacks = [
            name for name in ("state_dict", "load_state_dict") if not callable(getattr(each, name, None))
        ]
        if each is not None and lacks:
            raise UsageError(
                f"a schedule of type {type(each).__name__} without {' and '.join(lacks)}, and checkpoints",
                "a run that goes on must know where its schedule was",
                "give it both, as torch's schedulers have them (state_dict returns plain values), or train without "
                "checkpoints",
            )


def load_parts(step: StepCore, checkpoint: Checkpoint) -> None:
    """Give a step, model included, the state of a checkpoint. Raises ``UsageError`` where it does not fit."""
    weights = checkpoint.weights()
    add_made(step.model, weights, made_in(checkpoint))
    load_own_weights(step.model, weights, f"of checkpoint {checkpoint.path}")
    own = parts_of(step, step.model.state_dict(keep_vars=True))
    differ = [part for part in OPTIONAL if (part in own) != (part in checkpoint)]
    if differ:
        has = {part: "has" if part in checkpoint else "lacks" for part in differ}
        raise UsageError(
            f"checkpoint {checkpoint.path} {', '.join(f'{has[part]} {part}' for part in differ)}",
            "the job's own state is another",
            "go on with the job that wrote it",
        )
    if "buffers" in checkpoint:
        load_buffers(step.model, checkpoint.part("buffers"), f"checkpoint {checkpoint.path}")
    if "modules" in own:
        step.model.load_state_dict(named_as_in(step.model, checkpoint.part("modules")), strict=False)
    load_by_name(step.optimizer, own_parameters(step.model).items(), checkpoint.part("optimizer"))
    # A loop that goes back to before its first step begins as it did then.
    step.per_sample = checkpoint.part("weight")["per_sample"] if "weight" in checkpoint else None
    if step.schedule is not None:
        step.schedule.load_state_dict(checkpoint.part("schedule"))
    if step.scaler is not None:
        step.scaler.load_state_dict(checkpoint.part("scaler"))
    if step.average is not None:
        step.average.load(checkpoint.part("ema"))


def made_in(checkpoint: Checkpoint) -> dict[str, str]:
    """Return which weights of a checkpoint its model made when it ran: see ``kway.step.made``."""
    return checkpoint.part("made") if "made" in checkpoint else {}


def other_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are not persistent, by own names: not part of the weights, but of what comes next."""
    return _besides(model.state_dict(keep_vars=True), model)


def _besides(saved: Mapping[str, Any], model: nn.Module) -> dict[str, torch.Tensor]:
    weights = own_weights(model, saved)
    return {name: buffer for name, buffer in own_buffers(model).items() if name not in weights}


@torch.no_grad()
def load_buffers(model: nn.Module, saved: Mapping[str, torch.Tensor], source: str) -> None:
    """Give the model what ``other_buffers`` gave. Raises ``UsageError`` for a buffer that it has no place for."""
    own, modules = other_buffers(model), own_modules(model)
    for name, value in saved.items():
        held = own.get(name)
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            held.copy_(value)
            continue
        parent, _, last = name.rpartition(".")
        module = modules.get(parent)
        if module is None:
            raise UsageError(f"{source} has a buffer {name!r}", "the model has none")
        # A buffer that grows while it is used, such as a cache: it takes the saved one's place.
        device = next((p.device for p in model.parameters()), value.device) if held is None else held.device
        add_buffer(module, last, value.to(device), persistent=False)
