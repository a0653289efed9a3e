"""What bounds a layer: the launch of its operations, the memory that they go through, or what they compute."""

import time
from dataclasses import dataclass

import torch

from kway.units import rate_text

# Side of the product, and bytes of the array, of which a device's rates are taken; how often.
SIDE = {"cpu": 512, "cuda": 4096}
BYTES = {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
TRIES = 5
# From this part of a layer's time on, what does not grow with the batch is what counts.
LAUNCHES = 0.5


@dataclass(frozen=True)
class Rates:
    """What a device does: ``flops_s`` floating-point operations a second in a product, ``bytes_s`` of memory."""

    flops_s: float
    bytes_s: float


def rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the best of a few products and passes over memory, in a tenth of a second."""
    side = SIDE[device.type]
    one = torch.ones(side, side, device=device, dtype=dtype)
    long_ = torch.zeros(BYTES[device.type] // 4, device=device)
    product = _best(lambda: torch.mm(one, one), device)
    # Read and written.
    passed = _best(lambda: long_.add_(1.0), device)
    return Rates(2 * side**3 / product, 2 * long_.nbytes / passed)


def _best(call: object, device: torch.device) -> float:
    assert callable(call)
    taken = []
    for _ in range(TRIES + 1):
        _wait(device)
        begun = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bound_of(seconds: float, fixed_s: float, flop: float, moved: float, rates: Rates) -> tuple[str, str]:
    """Return (bound, why) of a layer in one step: ``seconds`` in all, of which ``fixed_s`` whatever the batch.

    ``moved``: bytes in and out. Else by the roofline (Williams, Waterman and Patterson, "Roofline: an insightful visual
    performance model", 2009): below the device's own ratio of operations to bytes, memory bounds.
    """
    if seconds > 0 and fixed_s >= LAUNCHES * seconds:
        return "launch", f"{fixed_s / seconds:.0%} of its time does not depend on the batch"
    balance = rates.flops_s / rates.bytes_s
    intensity = flop / moved if moved else float("inf") if flop else 0.0
    text = f"{intensity:.3g} operations a byte, where this device does {balance:.3g}"
    text += f" ({rate_text(rates.flops_s, 'FLOP/s')}, {rate_text(rates.bytes_s, 'B/s')})"
    return ("compute" if intensity >= balance else "memory"), text
