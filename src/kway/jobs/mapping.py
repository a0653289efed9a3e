"""``kway.map``: independent jobs, such as folds and seeds, one on each device at a time."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kway.data.generators import seed_generators
from kway.data.seeds import key
from kway.devices.cpu_parts import parts
from kway.devices.select import parse, spelled
from kway.devices.topology import discover
from kway.errors import ItemError, UsageError, line_of
from kway.jobs.alone import refuse_among_ranks
from kway.jobs.place import rank_threads, torch_settings, with_settings, with_threads
from kway.launch import failure
from kway.launch.blame import check_value, dump_value
from kway.launch.call import Call, answer
from kway.launch.failure import Failure
from kway.launch.interrupt import signals_raise
from kway.launch.payload import dump, load
from kway.launch.pool import Ended, Pool
from kway.units import shown

ERRORS = ("raise", "return")
_PRELOAD = ("torch", "kway.jobs.mapping")


def map(
    fn: Callable[[Any], Any], items: Iterable[Any], devices: Any = "auto", *, errors: str = "raise"
) -> list[Any]:
    """Return ``[fn(item) for item in items]``, computed on all ``devices`` at once, one item a device at a time.

    Each device has a process of its own, which takes the next item when it is through with one: of GPUs it sees its own
    only (``cuda:0`` there), of ``cpu:N`` it keeps to its part of the cores. ``kway.train`` in ``fn`` trains on that one
    device. ``fn``, items and results travel between processes; each call gets new ones. What ``fn`` draws from the
    generators of torch, numpy and Python depends on torch's seed here and on the place of the item.

    ``errors="raise"``: the first call that fails ends all others, and is raised as ``ItemError``; ``"return"``: that
    stands in its place among the results, and the others go on. Raises ``UsageError``, before any process starts, for
    devices that are not there, and for what cannot travel.
    """
    listed = _checked(fn, items, errors)
    chosen = parse(spelled(devices), discover())[: len(listed)]
    check_value("fn", fn)
    for index, item in enumerate(listed):
        check_value(f"items[{index}]", item)
    if not listed:
        return []
    threads, on_cpu = rank_threads(chosen), chosen[0] == "cpu"
    results: list[Any] = [None] * len(listed)
    cores = parts(len(chosen)) if on_cpu else ()
    with (
        signals_raise(),
        Pool(chosen, threads=threads, cores=cores, preload=_PRELOAD) as pool,
    ):
        function = dump_value("fn", fn, pool.folder)
        seed, settings = torch.initial_seed(), torch_settings()

        def task_of(index: int) -> bytes:
            around = partial(_as_alone, settings, threads, key("map", seed, index))
            item = dump_value(f"items[{index}]", listed[index], pool.folder)
            return dump((answer, (Call(function, item, around, f"items[{index}]", str(pool.folder)),)))

        for ended in pool.run(len(listed), task_of):
            try:
                if ended.failed:
                    raise _error(ended.item, chosen[ended.place], ended.failed)
                results[ended.item] = _loaded(ended, chosen[ended.place])
            except ItemError as failed:
                if errors == "raise":
                    raise
                results[ended.item] = failed
    return results


def _loaded(ended: Ended, device: str) -> Any:
    """Return a result as it is here. Raises ``ItemError`` for one that its own class cannot make again."""
    try:
        return load(ended.result, keep=False)
    except Exception as error:
        cause = f"its result cannot be loaded: {line_of(error)}"
        raise ItemError(ended.item, device, ended.place, 1, cause) from error


def _checked(fn: Any, items: Any, errors: Any) -> list[Any]:
    if not callable(fn):
        raise UsageError(f"fn is of type {type(fn).__name__}", "it must be a function of one item")
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise UsageError(f"items is of type {type(items).__name__}", "it must be a list of them")
    if errors not in ERRORS:
        raise UsageError(f"errors={shown(errors)}", "it is raise or return")
    refuse_among_ranks(
        "kway.map",
        "each of them would do all of it, on the same devices",
        "start the script by itself: it needs no launcher",
    )
    return list(items)


@contextmanager
def _as_alone(settings: dict[str, Any], threads: int, seed: int) -> Iterator[None]:
    """Let a call find what it would find in a process that has done nothing before: here others have run already."""
    with with_threads(threads), with_settings(settings):
        seed_generators(seed)
        # Of the one GPU that is seen here, if there is one; a GPU that is not used is left asleep.
        torch.cuda.manual_seed(seed)
        yield


def _error(index: int, device: str, failed: Failure) -> ItemError:
    error = ItemError(
        index, device, failed.rank, failed.exit_code, failed.cause, failed.traceback, failed.died
    )
    own = failure.to_error(failed)
    if failed.error is not None:
        error.__cause__ = own
    return error
