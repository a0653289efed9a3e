"""Loader processes of one rank, on top of torch's ``DataLoader``.

The start method is ``forkserver``. Forking a rank itself can hang for ever: it has threads (Gloo, OpenMP,
autograd), and a lock that one of them holds at that moment stays locked in the child. ``spawn`` is safe too,
but imports torch anew in each worker (about 2 s each); the fork server imports it once, before it has
threads, and later workers start in milliseconds.
"""

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from multiprocessing import parent_process
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from kway.data.fork_server import Context
from kway.data.parcel import Answer, Failure, Parcel, Reader, dumped
from kway.errors import UsageError
from kway.worker_deaths import death, no_room, too_little_shared_memory

_PATIENCE_S = 2.0
_PR_SET_PDEATHSIG = 1
# What torch's iterator shares with its processes through named semaphores.
_SHARED = ("_index_queues", "_worker_result_queue", "_data_queue", "_workers_done_event")


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keep to ourselves that torch would start fewer processes."""
    # Filters are the process's. Ranks that are threads put back none of each other's: they open and read loaders in
    # their turns (decision 20), and nothing in here waits for another rank, which alone would give a turn away.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


class Workers:
    """``count`` processes that answer requests in order. They are kept from epoch to epoch.

    Data set, collate and ``init`` travel with cloudpickle, so lambdas and classes of ``__main__`` work; each
    process gets a copy of the data set. ``named``: whether the user said how many, and hears what torch thinks of so
    many on so few processors. Raises ``UsageError`` where they cannot be pickled.
    """

    def __init__(
        self,
        reader: Reader,
        count: int,
        init: Callable[[int], None] | None,
        rank: int,
        named: bool = True,
    ) -> None:
        try:
            parcel = Parcel(dumped((reader, init)))
        except Exception as error:
            raise UsageError(
                f"{type(reader.dataset).__name__} cannot be sent to loader workers ({error})",
                "a data set that can be pickled",
                "use workers=0",
            ) from error
        self._rank, self._parcel, self._requests = rank, parcel, _Requests()
        self._said: Callable[[], AbstractContextManager[None]] = nullcontext if named else _unsaid
        with self._said():
            self._loader: DataLoader[Any] | None = DataLoader(
                parcel,
                batch_size=None,
                sampler=self._requests,
                num_workers=count,
                collate_fn=_as_it_is,
                worker_init_fn=_begin,
                multiprocessing_context=Context.preloaded(),
                persistent_workers=True,
                generator=torch.Generator(),  # else a draw from the process's own generator
            )

    def read(self, requests: Iterator[Any]) -> Iterator[Any]:
        """Yield the answer to each request, in order."""
        if self._loader is None:
            raise UsageError("workers that were closed", "open ones")
        self._requests.now = requests
        with self._said():
            answers = iter(self._loader)
        self._parcel.content = b""  # all processes have it
        while True:
            answer = self._next(answers)
            if answer is None:
                return
            if isinstance(answer, Failure):
                raise self._explained(answer)
            yield answer.value

    def _next(self, answers: Iterator[Any]) -> Any:
        try:
            answer: Answer | Failure | None = next(answers, None)
            if isinstance(answer, Answer):
                answer.open()
        except (RuntimeError, OSError, EOFError) as error:
            # What it says depends on where the end of a process shows first; the process itself tells.
            found = death(self._processes(), self._rank)
            if found is None:
                raise
            raise found from error
        return answer

    def _explained(self, failure: Failure) -> Exception:
        error = failure.error()
        if not too_little_shared_memory(str(error)):
            return error
        found: Exception = no_room(f"{failure.where} of rank {self._rank}")
        found.__cause__ = error
        return found

    def close(self) -> None:
        """End the processes now, also where a traceback or a left epoch still holds their iterator."""
        iterator = None if self._loader is None else self._loader._iterator
        processes = self._processes()
        self._loader = None
        end = getattr(iterator, "_shutdown_workers", None)  # torch offers no public way
        if end is None:
            return
        # Torch waits 5 s for each one that is stuck, and for ever for one that was stopped.
        impatience = threading.Timer(_PATIENCE_S, _kill, [processes])
        impatience.start()
        try:
            end()
        finally:
            impatience.cancel()
            _kill(processes)
            # Their names go with them, and a traceback may hold the iterator until this process is killed.
            for name in _SHARED:
                vars(iterator).pop(name, None)

    def _processes(self) -> list[Any]:
        iterator = None if self._loader is None else self._loader._iterator
        return list(getattr(iterator, "_workers", []))


def _kill(processes: list[Any]) -> None:
    for process in processes:
        with suppress(OSError, ValueError):  # ended meanwhile, or closed
            process.kill()


class _Requests(Sampler[Any]):
    """Hands an epoch's requests to torch's loader."""

    def __init__(self) -> None:
        self.now: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.now


def _as_it_is(answer: Any) -> Any:
    return answer


def _begin(worker: int) -> None:
    """Start a worker: end it with its rank, open the parcel, call the user's own ``worker_init_fn``."""
    if sys.platform == "linux":
        # This reaches a worker that is stuck outside of Python: its parent, the fork server, leaves with the rank.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _let_fork_server_go()
    # An order to stop is for the rank, which still wants batches; it often goes to a process group. SIGTERM itself
    # must act: with it Python ends what a script left running.
    with suppress(OSError):
        os.setpgrp()
    for number in (signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, daemon=True).start()
    info = get_worker_info()
    assert info is not None
    parcel: Any = info.dataset
    init = parcel.open()
    # What a user's worker_init_fn expects to find there; the info refuses plain assignment.
    object.__setattr__(info, "dataset", parcel.reader.dataset)
    if init is not None:
        init(worker)


def _let_fork_server_go() -> None:
    """Close this process's end of the pipe that keeps the fork server: only the rank is to keep it."""
    server = getattr(import_module("multiprocessing.forkserver"), "_forkserver", None)
    kept = getattr(server, "_forkserver_alive_fd", None)
    if isinstance(kept, int):
        os.close(kept)
        setattr(server, "_forkserver_alive_fd", None)  # noqa: B010 (the standard library's own, untyped)


def _end_with_rank() -> None:
    # The parent of this process is the fork server, which may be stopped. The pipe to the rank closes the moment
    # that the rank is gone, however it ended.
    rank = parent_process()
    if rank is not None:
        rank.join()
        os.kill(os.getpid(), signal.SIGKILL)
