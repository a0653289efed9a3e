"""How much room a device has, and who takes it."""

import resource
from dataclasses import dataclass
from typing import Self

import torch

from kway.devices import cpu


@dataclass(frozen=True)
class Room:
    """Memory of a device in bytes, ``None`` where nobody knows.

    ``total``, and ``free`` of it for anybody; ``most``: what this process may take of it, whoever else is there.
    ``allocated``, ``reserved``, ``peak``: by torch in this process, tensors now, with what it keeps for later, and the
    most in tensors so far. ``others``: by other processes, and outside of torch. ``resident``, ``resident_peak``: of
    this process in the memory of the machine.
    """

    total: int
    free: int
    most: int
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    others: int | None = None
    resident: int | None = None
    resident_peak: int | None = None

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Look at a device. Of a CPU the machine's memory, or what a control group leaves of it."""
        if device.type == "cuda":
            return cls._of_gpu(device)
        total, free = cpu.memory()
        now, peak = cpu.resident() or (None, None)
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        most = total if limit == resource.RLIM_INFINITY else min(total, limit)
        return cls(total, free, most, resident=now, resident_peak=peak)

    @classmethod
    def _of_gpu(cls, device: torch.device) -> Self:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        return cls(
            total,
            free,
            int(total * share),
            torch.cuda.memory_allocated(device),
            reserved,
            torch.cuda.max_memory_allocated(device),
            max(0, total - free - reserved),
        )

    @property
    def unused(self) -> int | None:
        """What torch keeps for later and no tensor takes: in pieces that may be too small for what is asked for."""
        if self.reserved is None or self.allocated is None:
            return None
        return self.reserved - self.allocated

    @property
    def own(self) -> int:
        """What the tensors of this process can take in all."""
        return max(0, min(self.most, self.total - (self.others or 0)))


def begin_peak(device: torch.device) -> None:
    """Let the peak of a GPU be that of what comes: another job of this process may have had a higher one."""
    if device.type == "cuda":
        # On its own it asks for a device that has been used.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device)
