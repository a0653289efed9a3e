"""Two devices at once against one after the other: timed by hand, and by ``kway measure``.

    python examples/overlap.py

Fifty products on each of two devices: GPUs where there are two, to which one process sends work without waiting; else
two halves of the CPU, by hand two threads of one process, in kway two processes.
"""

import time
from collections.abc import Callable
from statistics import median
from threading import Thread

import torch

import kway

GPUS = torch.cuda.device_count() > 1
DEVICES = [torch.device("cuda", i) for i in range(2)] if GPUS else [torch.device("cpu")] * 2
N, PRODUCTS = (2000 if GPUS else 128), 50

PAIRS = [torch.randn(2, N, N, device=device) for device in DEVICES]


def work(place: int) -> None:
    """Multiply on one device. On a GPU this returns before the work is done."""
    if not GPUS:
        torch.set_num_threads(1)  # of this thread
    a, b = PAIRS[place]
    for _ in range(PRODUCTS):
        torch.mm(a, b)


def wait() -> None:
    """Wait until the GPUs are idle."""
    for device in DEVICES if GPUS else ():
        torch.cuda.synchronize(device)


def in_turn() -> None:
    """Let the second device begin when the first has ended."""
    for place in (0, 1):
        work(place)
        wait()


def at_once() -> None:
    """Let both begin together."""
    threads = [Thread(target=work, args=(place,)) for place in (0, 1)] if not GPUS else []
    for thread in threads:
        thread.start()
    for place in (0, 1) if GPUS else ():
        work(place)
    for thread in threads:
        thread.join()
    wait()


def seconds(act: Callable[[], None]) -> float:
    """Return the median time of nine calls; the first, which pays for memory and code, does not count."""
    samples = []
    for _ in range(10):
        begun = time.perf_counter()
        act()
        samples.append(time.perf_counter() - begun)
    return median(samples[1:])


hand = {"one after the other": seconds(in_turn), "at once": seconds(at_once)}
record = kway.measure(devices=2 if GPUS else "cpu:2", only=["overlap"], quick=True)
print(f"{PRODUCTS} products of {N} x {N} on each of two devices ({DEVICES[0].type})   milliseconds")
print("                        by hand      kway   spread")
for way, value in hand.items():
    figures = record.find("overlap", f"two devices, {PRODUCTS} products each", way=way, n=N)
    told = [f"{figure['value'] * 1e3:9.3f}   {figure['spread']:.0%}" for figure in figures]
    print(f"{way:20}  {value * 1e3:9.3f} {told[0] if told else '  (no time)'}")
