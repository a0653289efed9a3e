"""What says that memory ran out, and where: read off the exception that torch or Python raised."""

import re
import traceback
from pathlib import Path

import torch

import kway
from kway.errors import text_of
from kway.step.core import StepCore

# What torch raises as something else than its own class for it: the allocator of CPUs, the driver, and libraries that
# ask the driver themselves.
_HOST = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_DEVICE = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) ?(bytes|[KMGTP]iB)")
_UNITS = {unit: 1024**power for power, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"))}
# The innermost of them in a traceback is what a step was at.
_PHASES = {
    StepCore.forward.__code__: "forward",
    StepCore.output.__code__: "forward",
    StepCore.backward.__code__: "backward",
    StepCore.update.__code__: "update",
}
_OWN = Path(kway.__file__).parent
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(_OWN))
_EXAMPLES = str(_OWN / "zoo")


def is_exhaustion(error: BaseException) -> bool:
    """Whether an exception says that memory ran out. Words count only in exceptions of the classes that torch uses."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) in (RuntimeError, torch.AcceleratorError) and any(
        sign in text_of(error) for sign in (*_HOST, *_DEVICE)
    )


def is_of_host(error: BaseException) -> bool:
    """Whether it was the memory of the machine, whatever the device."""
    return isinstance(error, MemoryError) or any(sign in text_of(error) for sign in _HOST)


def asked_for(error: BaseException) -> int | None:
    """Return how many bytes were asked for at once, where the message says so."""
    found = _ASKED.search(text_of(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def phase_of(error: BaseException) -> str:
    """Return what a step was at: ``forward``, ``backward``, ``reduction``, ``update``, or ``step`` for the rest."""
    phase = "step"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        phase = _PHASES.get(frame.f_code, phase)
        # What is sent while backward is at work is backward's.
        if phase == "step" and frame.f_globals.get("__name__", "").startswith("kway.comm."):
            phase = "reduction"
    return phase


def line_of_user(error: BaseException) -> str:
    """Return ``FILE:LINE`` of the innermost code that is neither torch's nor kway's, or nothing."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        foreign = path.startswith("<") or (path.startswith(_NOT_THE_USERS) and not path.startswith(_EXAMPLES))
        found = found if foreign else f"{Path(path).name}:{line}"
    return found
