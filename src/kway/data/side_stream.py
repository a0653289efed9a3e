"""A stream of a GPU beside the one that computes: what torch.cuda offers, and nothing that decides."""

from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class Mark(Protocol):
    """A point in a stream that is reached at some time."""

    def synchronize(self) -> None:
        """Let the host wait until it is reached."""


class Side(Protocol):
    """What copies to a device need of it. A double on the CPU stands in for it in tests."""

    def takes(self, source: Tensor) -> bool:
        """Whether this is a dense tensor that lies elsewhere than on the device."""

    def is_on_host(self, source: Tensor) -> bool:
        """Whether a tensor lies in memory that the host fills at once, and no stream."""

    def wait_for_producer(self, source: Tensor) -> None:
        """Let the side stream wait for what computes ``source`` on its own device, and keep its memory until then."""

    def empty_like(self, source: Tensor) -> Tensor:
        """Return memory on the device of the same shape, type and memory format, for the side stream to write."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Begin to copy on the side stream."""

    def pinned(self, size: int) -> Tensor:
        """Return ``size`` bytes that the device can read by itself. Raises ``RuntimeError`` where there are none."""

    def mark(self) -> Mark:
        """Return a mark behind all that the side stream has been given."""

    def reached(self) -> Mark:
        """Return a mark behind all that the stream that computes has been given."""

    def arrived(self, mark: Any, tensors: list[Tensor]) -> None:
        """Let what computes from now on wait for ``mark``, and keep the memory of ``tensors`` until it is done."""


class CudaSide:
    """The side stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def takes(self, source: Tensor) -> bool:
        """Whether this is a dense tensor on another device, of no class of its own and outside of autograd."""
        dense = type(source) is Tensor and source.layout is torch.strided and not source.is_quantized
        return dense and not source.requires_grad and source.device != self.device

    def is_on_host(self, source: Tensor) -> bool:
        """Whether a tensor lies on the CPU."""
        return source.device.type == "cpu"

    def wait_for_producer(self, source: Tensor) -> None:
        """Wait for the stream that is current on the source's GPU: it is the one that the data set used."""
        if source.is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream(source.device))
            # torch copies between GPUs on the source's current stream, and holds the memory for it.

    def empty_like(self, source: Tensor) -> Tensor:
        """Allocate from the memory of the side stream."""
        with torch.cuda.stream(self._stream):
            return torch.empty_like(source, device=self.device)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy without letting the host wait, where the source is pinned."""
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def pinned(self, size: int) -> Tensor:
        """Pin memory: milliseconds."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def reached(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def arrived(self, mark: torch.cuda.Event, tensors: list[Tensor]) -> None:
        """Let the current stream wait for the event. The host waits for nothing."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(mark)
        for tensor in tensors:
            # Allocated on the side stream: its memory could be given away while the current one still reads it.
            tensor.record_stream(current)
