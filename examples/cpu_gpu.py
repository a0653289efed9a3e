"""CPU against GPU: a thousand additions in place, timed by hand and by ``kway measure``.

    python examples/cpu_gpu.py

A GPU takes work on before it has done it: a clock that does not wait for it says how long the launches took. Where
there is no GPU, the CPU stands alone. The sizes are among those of a quick measurement.
"""

import time
from statistics import median

import torch

import kway

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
SIZES, TIMES = (4, 16, 64), 1000


def by_hand(device: str, n: int) -> float:
    """Return the seconds of a thousand additions to an n x n matrix, until they are done; median of five."""
    a, b = torch.zeros(n, n, device=device), torch.ones(n, n, device=device)
    samples = []
    for _ in range(6):
        begun = time.perf_counter()
        for _ in range(TIMES):
            a += b
        if device != "cpu":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - begun)
    return median(samples[1:])


record = kway.measure(devices=1 if len(DEVICES) > 1 else "cpu", only=["compute"], quick=True)
print(f"{TIMES} additions in place to an n x n matrix   milliseconds until they are done")
print("     n   device   by hand      kway   spread")
for n in SIZES:
    for device in DEVICES:
        found = record.find(
            "compute", f"in-place add, {TIMES} times", device=device, clock="synchronised", n=n
        )
        told = [f"{figure['value'] * 1e3:9.3f}   {figure['spread']:.0%}" for figure in found]
        print(f"{n:6}   {device:6} {by_hand(device, n) * 1e3:9.3f} {told[0] if told else '  (no time)'}")
