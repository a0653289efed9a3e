"""From a job to an initialised module."""

import inspect
import json
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from kway.checkpoints.loading import check_names, load_own_weights
from kway.errors import UsageError, one_line, text_of
from kway.job import Job
from kway.launch.interrupt import EndedBySignal
from kway.launch.temporary import check_temporary
from kway.step.made import add_made, unmade
from kway.step.seeds import preserved_everywhere
from kway.step.storage import read_made, read_tensors

# What an optimizer's function is called with, and how it makes two groups of that.
_NAMED = (
    "it is called with the model's named parameters, an iterator of pairs (name, parameter)",
    "two groups: named = list(named); return torch.optim.SGD([{'params': [pair for pair in named if pair[1].ndim > 1]}"
    ", {'params': [pair for pair in named if pair[1].ndim <= 1], 'weight_decay': 0.0}], lr=0.1)",
)


def build(job: Job) -> nn.Module:
    """Return the job's module with its initial weights.

    An instance is returned as it is. A function is called with torch's generator seeded by the job's seed, in
    the caller's random state otherwise. Raises ``UsageError`` with the user's traceback where the function
    fails, or returns no module.
    """
    with preserved_everywhere():
        torch.manual_seed(job.seed)
        model = job.model if isinstance(job.model, nn.Module) else called(f"model {job.title!r}", job.model)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model {job.title!r} is of type {type(model).__name__}",
                "it must make an nn.Module",
                "return one",
            )
        if callable(job.init):
            called("init", job.init, model)
        elif job.init is not None:
            load_weights(model, Path(job.init))
    if not any(True for _ in model.named_parameters()):
        raise UsageError(f"model {job.title!r} has no parameters", "there is nothing to train")
    return model


def called(what: str, function: Any, *args: Any, do: str = "", given: tuple[str, str] = ("", "")) -> Any:
    """Return ``function(*args)``. Raises ``UsageError`` with the user's traceback where it fails.

    ``what`` names it in that error, and ``do`` says what can be done; ``given`` says what it is called with, and what
    can be done, where it may have taken that for something else. Where the function does not take these arguments no
    code of the user ran: the error says how it is called instead.
    """
    try:
        return function(*args)
    except (UsageError, EndedBySignal):
        raise
    # Code that exits would end the command with its own exit code, in silence.
    except (Exception, SystemExit) as error:
        got = f"{what} raised {type(error).__name__}: {one_line(text_of(error))}"
        # The first frame is the one above, which says nothing to the user.
        inside = error.__traceback__.tb_next if error.__traceback__ is not None else None
        if inside is None:
            raise UsageError(got, *_how_called(function, args, do)) from None
        trace = "".join(traceback.format_exception(type(error), error, inside))
        # These two are what a thing of another kind than was thought leads to.
        need, what_to_do = given if isinstance(error, AttributeError | TypeError) else ("", do)
        raise UsageError(f"{trace}\n{got}", need, what_to_do or do) from error


def _how_called(function: Any, args: tuple[Any, ...], do: str) -> tuple[str, str]:
    """Return what is needed, and what to do, where ``function`` cannot be called with ``args``; else ("", ``do``)."""
    try:
        # A decorator may add what the function inside of it needs.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return "", do
    try:
        signature.bind(*args)
    except TypeError:
        pass
    else:
        return "", do
    count = len(args)
    need = f"it is called {f'with {count} argument' + 's' * (count > 1) if count else 'without arguments'}"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [each for each in signature.parameters.values() if each.kind not in variadic]
    missing = ", ".join(f"{each.name}=..." for each in taken[count:] if each.default is each.empty)
    if do or not missing:
        return need, do
    return need, f"give a function that needs no others, or functools.partial({_name(function)}, {missing})"


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def check_factory(what: str, function: Any) -> None:
    """Raise ``UsageError`` for a function that cannot be called with one thing, before it is."""
    need, do = _how_called(function, (None,), "")
    if need:
        raise UsageError(f"{what} {_name(function)!r} cannot be called as it is", need, do)


def make_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Call the job's optimizer once. Raises ``UsageError`` with the user's traceback where that fails."""
    # Torch looks for one where its first optimizer is made, and the optimizer would be blamed.
    check_temporary()
    optimizer = called("the optimizer", job.optimizer, model.named_parameters(), given=_NAMED)
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"the optimizer is of type {type(optimizer).__name__}",
            "it must make a torch.optim.Optimizer",
            "for two optimizers (a GAN) make two jobs in a loop of your own: docs/guide/your-own-loop.md"
            if isinstance(optimizer, tuple | list | Mapping)
            else "pass partial(torch.optim.SGD, lr=0.1), say",
        )
    check_optimizer(type(optimizer))
    own = {id(parameter) for _, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if others := [parameter for parameter in held if id(parameter) not in own]:
        raise UsageError(
            f"the optimizer holds {len(others)} of {len(held)} parameters that are not of the job's model",
            "every device trains a copy of the model of its own",
            "let its factory use the parameters that it is called with",
        )
    return optimizer  # type: ignore[no-any-return]


def make_schedule(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    """Call the job's schedule once, if it has one. Raises ``UsageError`` as ``make_optimizer`` does."""
    return scheduler_of(job.schedule, optimizer)


def scheduler_of(factory: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that ``factory`` makes, if there is one. Raises ``UsageError`` as ``make_optimizer``."""
    if factory is None:
        return None
    schedule = called("the schedule", factory, optimizer)
    if not hasattr(schedule, "step"):
        raise UsageError(
            f"the schedule is of type {type(schedule).__name__}",
            "it must make a scheduler of torch",
            "pass partial(torch.optim.lr_scheduler.StepLR, step_size=10), say",
        )
    return schedule


def check_optimizer(factory: Any) -> None:
    """Raise ``UsageError`` for a class of optimizers, or a partial of one, whose step asks for a closure.

    What another function makes is checked where it is made.
    """
    while isinstance(factory, partial):
        factory = factory.func
    step = getattr(factory, "step", None) if isinstance(factory, type) else None
    if not inspect.isfunction(step):
        return
    _, *taken = inspect.signature(step).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in taken if each.default is each.empty and each.kind not in variadic]
    if needed:
        raise UsageError(
            f"optimizer {factory.__name__}, whose step() asks for {', '.join(needed)}",
            "kway computes a batch's gradients once and then calls step() with nothing",
            "choose one whose step needs no closure, like SGD or AdamW",
        )


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file by the model's own names, or that of a run's folder, into ``model``.

    A model that has not run gets what the file says was made when it first ran.

    Raises ``UsageError`` for a file that cannot be read or whose names or shapes differ from the model's.
    """
    try:
        path = weights_at(path)
        state, made = read_tensors(path), read_made(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"weights {path} cannot be read: {error}",
            "a safetensors file is needed",
            "name one, or the folder of a run",
        ) from None
    try:
        # Before anything is made in a model that the weights are not of.
        check_names(model, unmade(state, made, model), path)
        add_made(model, state, made)
        load_own_weights(model, state, path)
    except UsageError as error:
        trained = _trained(path.with_name("train.json"))
        if trained is None:
            raise
        raise UsageError(
            error.got, error.need, f"{path.with_name('train.json')} says that they are of {trained!r}"
        ) from None


def weights_at(path: Path) -> Path:
    """Return the weights file that a path names: itself, or that of a run's folder."""
    return path / "weights.safetensors" if path.is_dir() else path


def made_before(job: Job) -> dict[str, str]:
    """Return what of a built job's weights another copy of its model once made: see ``kway.step.made``."""
    if job.init is None or callable(job.init):
        return {}
    return read_made(weights_at(Path(job.init)))


def _trained(record: Path) -> str | None:
    """Return which model the record of a run names, ``None`` where there is none that can be read."""
    try:
        return str(json.loads(record.read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
