"""Recording of a device's work, to be done again with one call: CUDA graphs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

import torch

from kway.step.seeds import Draws


class Recording(Protocol):
    """Work that was recorded. It reads and writes the same memory each time."""

    def replay(self) -> None:
        """Give the device the work once more. Nothing waits."""

    def seed(self, keys: Sequence[int]) -> None:
        """Seed what the work draws from, before a replay: one key for each place that it draws at."""

    def close(self) -> None:
        """Let go of the device's work, which cannot be done again after that."""


class Recorder(Protocol):
    """Records work of one device."""

    def record(self, work: Callable[[Draws], None], places: int) -> Recording:
        """Record ``work``, which draws at ``places`` places (0: nowhere). It is not done yet.

        Raises what the work raises, and ``RuntimeError`` for what a device cannot record.
        """


@cache
def _stream_of(device: torch.device) -> Any:
    """Return the stream that a device's work is recorded on, always the same.

    torch keeps what cuBLAS works in, tens of MiB, for each stream that it was ever used on, as long as the process
    lives. A stream is a part of the device rather than state of this module.
    """
    stream: Any = torch.cuda.Stream
    return stream(device)


class CudaRecorder:
    """Records as CUDA graphs, which share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._alive: WeakSet[CudaRecording] = WeakSet()
        self._stream = _stream_of(device)

    def record(self, work: Callable[[Draws], None], places: int) -> "CudaRecording":
        """Record ``work``: see ``Recorder``."""
        graph = torch.cuda.CUDAGraph()
        own = [torch.Generator(self.device) for _ in range(places)]
        for generator in own:
            graph.register_generator_state(generator)
        torch.cuda.synchronize(self.device)
        # A pool is gone with the last graph that uses it.
        pool = next((other.pool for other in self._alive), None) or torch.cuda.graph_pool_handle()
        with self._capturing(graph, pool):
            work(_Lent(self.device, own))
        made = CudaRecording(graph, own, pool, self.device)
        self._alive.add(made)
        return made

    @contextmanager
    def _capturing(self, graph: Any, pool: Any) -> Iterator[None]:
        """Let what runs inside be recorded. Afterwards the device can be used as before, also where that failed."""
        default = torch.cuda.default_generators[self.device.index or 0]
        state = default.graphsafe_get_state()
        spare = default.clone_state()
        ended = False
        torch.cuda.empty_cache()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads, such as those that watch over collectives, may use the device meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
                ended = True
        finally:
            if ended:
                default.graphsafe_set_state(state)
            else:
                # What a broken recording leaves open: a generator that counts for it, and memory kept for it.
                default.graphsafe_set_state(spare)
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)


class CudaRecording:
    """One CUDA graph, and the generators from which it draws."""

    def __init__(
        self, graph: Any, generators: Sequence[torch.Generator], pool: Any, device: torch.device
    ) -> None:
        self._graph, self._generators, self.pool, self._device = graph, generators, pool, device

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()

    def seed(self, keys: Sequence[int]) -> None:
        """Seed the generators; a graph that draws nowhere has none."""
        for generator, key in zip(self._generators, keys, strict=False):
            generator.manual_seed(key)

    def close(self) -> None:
        """Free the graph once it has run."""
        # After an error of the device nothing of this can be done, and that error is the one to tell.
        with suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
            self._graph.reset()


class _Lent(Draws):
    """Draws from one generator a place; each is seeded from outside before the work is done."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self._default: Any = torch.cuda.default_generators[device.index or 0]
        self._generators = generators

    def at(self, place: int) -> None:
        """Let the device's default generator be that of the place."""
        if self._generators:
            self._default.graphsafe_set_state(self._generators[place])
