"""Copies of tensors in CPU memory, taken between two steps without stopping the device.

A GPU copies on a stream of its own, after what was queued before and before what is queued next: the calling thread
returns at once, and the next step cannot change a tensor that is still being read. The memory is pinned, which
makes such copies asynchronous, and kept for the next time: taking it costs more than the copy.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch


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
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Copy:
        """Copy ``tensors``; those of a GPU as of the current stream's next operation.

        Not to be called while the last copy is in use. Raises ``RuntimeError`` where memory runs out.
        """
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        on_gpus: dict[torch.device, list[str]] = {}
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                on_gpus.setdefault(tensor.device, []).append(name)
            else:
                self._buffers[name].copy_(tensor.detach())
        events = [self._from_gpu(device, names, tensors) for device, names in on_gpus.items()]
        return Copy(dict(self._buffers), tuple(events))

    def _from_gpu(
        self, device: torch.device, names: list[str], tensors: Mapping[str, torch.Tensor]
    ) -> torch.cuda.Event:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side, training = self._streams[device], torch.cuda.current_stream(device)
        # Conjugates and negatives that are not computed yet need the training stream.
        values = [tensors[name].detach().resolve_conj().resolve_neg() for name in names]
        side.wait_stream(training)
        with torch.cuda.stream(side):
            for name, value in zip(names, values, strict=True):
                self._buffers[name].copy_(value, non_blocking=True)
                # A tensor made for this snapshot is freed soon: its memory must not be handed out before.
                value.record_stream(side)
            event: torch.cuda.Event = side.record_event()
        training.wait_event(event)
        return event

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        strides = torch.empty_like(tensor, device="meta").stride()
        held = self._buffers.get(name)
        if held is not None and (held.shape, held.dtype, held.stride()) == (
            tensor.shape,
            tensor.dtype,
            strides,
        ):
            return held
        if tensor.is_cuda:
            # Pinned memory can run out before memory does; a copy into other memory is only slower.
            with suppress(RuntimeError):
                return torch.empty_strided(
                    tensor.shape, strides, dtype=tensor.dtype, device="cpu", pin_memory=True
                )
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
