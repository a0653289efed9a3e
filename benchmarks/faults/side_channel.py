"""Count what ranks spend on saying where they are, and on comparing their collectives, by step of LeNet.

Every call of the side channel and of the fingerprint is timed where it happens, in runs that alternate with runs
without timers, whose step it is compared with. Beside each call a call of nothing is timed, and taken off. Prints one
JSON object; exit code 1 above the bar.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import kway
from kway.comm.trace import Trace
from kway.jobs.place import Place, place
from kway.launch.status import Status
from kway.step.core import StepCore
from kway.step.signs import Signs
from kway.training.loop import Loop
from kway.training.spec import TrainSpec
from kway.training.straggler import OwnWork
from kway.zoo import lenet

BAR = 0.005
BATCH, STEPS = 256, 100
PARTS: dict[str, list[tuple[type, str]]] = {
    "status": [(Status, "at"), (Status, "beat"), (Status, "_enter"), (Status, "_leave"), (Status, "_begin")],
    "own work": [(OwnWork, "begin"), (OwnWork, "end")],
    "fingerprint": [
        (Trace, "note"),
        (Trace, "add"),
        (Signs, "begin"),
        (Signs, "write"),
        (Signs, "tell"),
        (StepCore, "mispaired"),
        (StepCore, "compare"),
    ],
}


def job() -> kway.Job:
    """Make the job: random images, an epoch of STEPS batches."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH * STEPS, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (BATCH * STEPS,), generator=generator)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = partial(lenet.build, (1, 28, 28), 10)
    return kway.Job(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd, data=(images, labels), batch_size=BATCH
    )


def nothing() -> None:
    """Take the time of a call that does nothing: the timer's own."""


class Timer:
    """Adds up, by function, the time of outermost calls and, beside, that of as many calls of ``nothing``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.empty: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inside = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, timed under ``name``."""
        for table in (self.seconds, self.empty, self.calls):
            table[name] = 0

        @wraps(function)
        def inner(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside = True
            begun = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                ended = time.perf_counter()
                nothing()
                self.empty[name] += time.perf_counter() - ended
                self.seconds[name] += ended - begun
                self.calls[name] += 1
                self._inside = False

        return inner


def measure(context: Any, spec: TrainSpec, rounds: int) -> dict[str, Any]:
    """Train several times on one rank, in turn without and with timers."""
    names = {f"{part}: {name}": (owner, name) for part, pairs in PARTS.items() for owner, name in pairs}
    plain: list[float] = []
    inside, empty, calls = (dict.fromkeys(names, 0.0) for _ in range(3))
    for number in range(2 * rounds):
        timer = Timer()
        kept = [(owner, name, getattr(owner, name)) for owner, name in names.values()]
        if number % 2:
            for title, (owner, name) in names.items():
                setattr(owner, name, timer.timed(title, getattr(owner, name)))
        try:
            module = spec.job.model()
            record = Loop(context.world, spec, module, context.emit, status=context.status).run()
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)
        if not number % 2:
            plain.append(record.measured_step_s)
            continue
        for title in names:
            inside[title] += timer.seconds[title] / record.steps / rounds
            empty[title] += timer.empty[title] / record.steps / rounds
            calls[title] += timer.calls[title] / record.steps / rounds
    return {"step_s": median(plain), "steps_s": plain, "inside_s": inside, "timer_s": empty, "calls": calls}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cpu:2", help="a device set (default cpu:2)")
    parser.add_argument("--exactness", default="math", help="math or bits (default math)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind (default 5)")
    options = parser.parse_args()
    where: Place = place(options.devices, "data", options.exactness)
    with tempfile.TemporaryDirectory() as folder:
        spec = TrainSpec(job=job(), plan=where.plan, folder=str(Path(folder)), epochs=1)
        ranks = where.run(measure, spec, options.rounds)
    with_timer = [sum(rank["inside_s"].values()) / rank["step_s"] for rank in ranks]
    fractions = [
        (sum(rank["inside_s"].values()) - sum(rank["timer_s"].values())) / rank["step_s"] for rank in ranks
    ]
    result = {
        "work": f"LeNet, batch {BATCH}, {options.exactness}",
        "devices": where.plan.device_set,
        "torch": torch.__version__,
        "fraction": max(fractions),
        "fraction_with_timers": max(with_timer),
        "bar": BAR,
        "ranks": ranks,
    }
    print(json.dumps(result, indent=2))
    return int(max(fractions) > BAR)


if __name__ == "__main__":
    sys.exit(main())
