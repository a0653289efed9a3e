"""Copies of tensors in CPU memory, taken between two steps without stopping the device.

A GPU first copies to memory of its own, in a few launches, after what was queued before and before what is queued
next; from there one copy on another stream goes to the CPU while training goes on. Where the GPU has no room for
that, the next step waits for the copies to the CPU. The calling thread waits for neither. The memory on the CPU is
pinned, which makes such copies asynchronous, and kept for the next time: taking it costs more than the copy.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import is_not

import torch

from kway.checkpoints.block import Place, places, size_of, views


@dataclass(frozen=True)
class Copy:
    """Copies by name. They are complete once ``wait`` has returned, and valid until the next ``take``."""

    tensors: dict[str, torch.Tensor]
    events: tuple[torch.cuda.Event, ...]

    def wait(self) -> None:
        """Wait, in whichever thread, until every copy is complete."""
        for event in self.events:
            event.synchronize()


class Copies:
    """Memory for copies of one set of tensors, again and again."""

    def __init__(self) -> None:
        self._on_cpu: dict[str, torch.Tensor] = {}
        self._of_gpus: dict[torch.device, _FromGpu] = {}

    def ready(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the memory for copies of ``tensors`` of a GPU, for the ``take`` that comes next; this copies nothing.

        Not to be called while the last copy is in use. Raises ``RuntimeError`` where memory runs out.
        """
        for device, held in _by_gpu(tensors).items():
            self._of(device).ready(held)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Copy:
        """Copy ``tensors``; those of a GPU as of the current stream's next operation.

        Not to be called while the last copy is in use. Raises ``RuntimeError`` where memory runs out.
        """
        on_cpu = {
            name: self._buffer(name, tensor).copy_(tensor.detach())
            for name, tensor in tensors.items()
            if not tensor.is_cuda
        }
        self._on_cpu, found, events = on_cpu, dict(on_cpu), []
        for device, held in _by_gpu(tensors).items():
            copied, event = self._of(device).take(held)
            found.update(copied)
            events.append(event)
        return Copy({name: found[name] for name in tensors}, tuple(events))

    def _of(self, device: torch.device) -> "_FromGpu":
        if device not in self._of_gpus:
            self._of_gpus[device] = _FromGpu(device)
        return self._of_gpus[device]

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        new = torch.empty_like(tensor, device="meta")
        held = self._on_cpu.get(name)
        if held is not None and (held.shape, held.dtype, held.stride()) == (
            new.shape,
            new.dtype,
            new.stride(),
        ):
            return held
        return torch.empty_strided(new.shape, new.stride(), dtype=new.dtype)


def _by_gpu(tensors: Mapping[str, torch.Tensor]) -> dict[torch.device, dict[str, torch.Tensor]]:
    gpus: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            gpus.setdefault(tensor.device, {})[name] = tensor
    return gpus


class _FromGpu:
    """Copies the tensors of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._places: dict[str, Place] = {}
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._views: dict[str, torch.Tensor] = {}
        # What there is memory for, and that on the GPU, where it has room.
        self._ready: list[torch.Tensor] = []
        self._stage: _Stage | None = None

    def ready(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have memory for copies of ``tensors``, here and on the CPU."""
        self._ready, self._stage = [], None
        where = places(tensors)
        self._hold(where)
        self._stage = self._made_stage(where)
        self._ready = [*tensors.values()]

    def take(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event]:
        """Return copies in CPU memory by name, and the event that completes them."""
        if len(self._ready) != len(tensors) or any(map(is_not, self._ready, tensors.values())):
            self.ready(tensors)
        stage, self._ready, self._stage = self._stage, [], None
        # Conjugates and negatives that are not computed yet need the training stream.
        values = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
        training = torch.cuda.current_stream(self._device)
        staged = None if stage is None else stage.fill(values)
        # Given back to the allocator with the last use of it.
        del stage
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            if staged is not None:
                self.memory.copy_(staged, non_blocking=True)
                staged.record_stream(self._stream)
            else:
                for name, value in values.items():
                    self._views[name].copy_(value, non_blocking=True)
                    # A tensor made for this snapshot is freed soon: its memory must not be handed out before.
                    value.record_stream(self._stream)
            event: torch.cuda.Event = self._stream.record_event()
        if staged is None:
            training.wait_event(event)
        return dict(self._views), event

    def _hold(self, where: dict[str, Place]) -> None:
        """Have memory on the CPU for ``where``: that of the last time, where nothing has changed."""
        if where == self._places:
            return
        size = size_of(where)
        self.memory, self._views = torch.empty(0, dtype=torch.uint8), {}
        # Pinned memory can run out before memory does; a copy into other memory is only slower.
        with suppress(RuntimeError):
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8)
        self._places, self._views = where, views(self.memory, where)

    def _made_stage(self, where: dict[str, Place]) -> "_Stage | None":
        """Take memory of the GPU, laid out as ``memory`` is; ``None`` where that would leave training too little."""
        size = self.memory.numel()
        free, _ = torch.cuda.mem_get_info(self._device)
        if 2 * size > free:
            return None
        try:
            return _Stage(torch.empty(size, dtype=torch.uint8, device=self._device), where)
        except torch.cuda.OutOfMemoryError:
            return None


class _Stage:
    """Memory of a GPU to which it copies at once what goes to the CPU from there."""

    def __init__(self, memory: torch.Tensor, where: dict[str, Place]) -> None:
        self._memory, self._there = memory, views(memory, where)
        # One dtype at a time: the kernel that copies many tensors at once takes no mixture.
        self._alike: dict[torch.dtype, list[str]] = {}
        for name, place in where.items():
            self._alike.setdefault(place.dtype, []).append(name)

    def fill(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Copy ``values``; return the memory."""
        for names in self._alike.values():
            torch._foreach_copy_([self._there[name] for name in names], [values[name] for name in names])
        return self._memory
