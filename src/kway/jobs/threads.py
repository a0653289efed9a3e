"""A task on ranks that are threads of this process: what each gets, and what is refused for want of processes."""

import copy
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from kway.comm.threads import ThreadGroup
from kway.data.arrays import InMemory
from kway.data.streams import is_stream
from kway.errors import RefusedError, UsageError, line_of
from kway.launch import threads
from kway.launch.shared_process import SharedProcess
from kway.launch.status import Status
from kway.step.copying import computed
from kway.step.process_wide import drawing, held
from kway.step.reach import walked
from kway.step.seeds import preserved_everywhere
from kway.training.own_contents import generator_like
from kway.training.own_functions import copies, of_process
from kway.units import shown
from kway.world import World

_ENDS = "its ranks are threads of this process, none of which can be ended by itself"
_LACKS = {
    "on_oom": _ENDS,
    "stall_timeout": _ENDS,
    "max_restarts": _ENDS,
    "tune_seconds": "its steps are eager: there is nothing to choose from",
    "timeline": "torch has one profiler for a process, which cannot begin once for each of its threads",
}


def run(make: Any, task: Any, arguments: tuple[Any, ...], device_set: list[str], count: int) -> list[Any]:
    """Call ``task(context, *arguments)`` in a thread for each device; return the results by rank.

    ``make(world, status)`` gives the context, ``count`` is of CPU threads a rank. Rank 0 gets the arguments
    themselves, each other rank a copy, in which only what data lies in is shared: functions close over copies as well.
    Random numbers and flags of torch are the caller's own afterwards. Raises what a rank raises, and ``RefusedError``
    for what cannot be copied.
    """
    size = len(device_set)
    own = [arguments, *(_copied(arguments) for _ in range(size - 1))]
    put_back, before = held(), torch.get_num_threads()
    process = SharedProcess(size, held, drawing)

    def replica(rank: int) -> Any:
        world = World(
            rank,
            size,
            rank,
            size,
            device_set[rank],
            "threads",
            count,
            "threads",
            partial(ThreadGroup, process),
        )
        torch.set_num_threads(count)
        if device_set[rank] != "cpu":
            torch.cuda.set_device(torch.device(device_set[rank]))
        status = Status(rank=rank)
        status.at("start")
        return task(make(world, status), *own[rank])

    with preserved_everywhere():
        try:
            return threads.run(replica, process)
        finally:
            put_back()
            # The number for threads to come is the process's own.
            torch.set_num_threads(before)


def needing_processes(on_oom: str, **asked: Any) -> dict[str, str]:
    """Return the options of a run that need a process a device, written out, each with the reason.

    ``asked``: options by name, each with a reason in ``_LACKS``.
    """
    if on_oom == "adapt":
        asked["on_oom"] = on_oom
    return {f"{what}={_written(value)}": _LACKS[what] for what, value in asked.items() if value}


def _written(value: Any) -> str:
    return f"{value.total_seconds():g} s" if isinstance(value, timedelta) else shown(value)


def lacking(in_threads: bool, needing: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first option for want of which ranks cannot be threads, with its reason; ``None`` where they can."""
    return next(iter(needing.items()), None) if in_threads else None


def check(where: Any, needing: Mapping[str, str]) -> None:
    """Raise ``UsageError`` where the ranks of ``where`` are threads and an option of a run needs processes."""
    if lack := lacking(where.in_threads, needing):
        what, why = lack
        raise UsageError(
            f"{what} with strategy threads", why, "use strategy data, which has a process a device"
        )


def _copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    memo, modules = of_process(), []
    for value in _reached(arguments):
        if id(value) in memo:
            continue
        if isinstance(value, torch.Generator):
            memo[id(value)] = generator_like(value)
        elif isinstance(value, nn.Module):
            memo |= computed([value])
            modules.append(value)
        else:
            memo[id(value)] = value
    try:
        # What fails leaves half-made copies in its memo.
        return copies(arguments, dict(memo), modules)
    except Exception as error:
        stream = _not_copied(arguments, memo)
        if stream is not None:
            raise RefusedError(
                f"strategy threads with data of type {stream} that cannot be copied ({line_of(error)})",
                "every replica reads a stream of its own",
                "open what cannot be copied where the reading begins (__iter__), and not before, or give its class a "
                "__deepcopy__",
            ) from error
        raise RefusedError(
            f"strategy threads with what cannot be copied: {type(error).__name__}: {error}",
            "every replica has a model, a loss and an order of samples of its own",
            "use strategy data, or leave out of model and loss what copy.deepcopy cannot copy",
        ) from error


def _not_copied(arguments: tuple[Any, ...], memo: Mapping[int, Any]) -> str | None:
    """Return the class of a stream that cannot be copied, or ``None`` where all can."""
    for value in walked(arguments, _is_shared):
        if isinstance(value, DataLoader | nn.Module) or not _is_stream(value):
            continue
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:
            return type(value).__name__
    return None


def _is_stream(value: Any) -> bool:
    try:
        return not isinstance(value, Mapping | list | tuple) and is_stream(value)
    except UsageError:
        return False


def _reached(arguments: tuple[Any, ...]) -> Iterable[Any]:
    """Yield what replicas share, or what has a way of its own to be copied: data sets, arrays, generators and models.

    Models are not looked into: theirs are tensors of their own.
    """
    return (value for value in walked(arguments, _is_shared) if _is_shared(value))


def _is_shared(value: Any) -> bool:
    return isinstance(value, torch.Generator | nn.Module) or _is_data(value)


def _is_data(value: Any) -> bool:
    """Whether ``value`` is read by index and never written: arrays, and data sets that have a length."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if isinstance(value, InMemory) or hasattr(value, "__array__"):
        return True
    reads = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return reads and not isinstance(value, Mapping | list | tuple)
