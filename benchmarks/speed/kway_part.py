"""kway's side on k devices in a process of its own: prints a JSON row for each way to train, as soon as it is known.

A way is MODEL:PRECISION:LEVEL:KIND:FORMAT, like ``resnet18:bf16:loose:compiled-graph:channels_last``.
"""

import argparse
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bars import settled_spread

from kway.errors import RefusedError

WARM_UP_EPOCHS = 2
EPOCHS = {"lenet": 16, "resnet18": 6}
LEARNING_RATES = {"lenet": 0.2, "resnet18": 0.1}
FORMATS = ("contiguous", "channels_last")
SMOKE_SAMPLES, SMOKE_BATCH = 240, 8


@dataclass(frozen=True)
class Way:
    """One way to train: what kway is asked for."""

    model: str
    precision: str
    level: str
    step_kind: str
    memory_format: str

    def __str__(self) -> str:
        return ":".join(vars(self).values())


def way_of(text: str) -> Way:
    """Read a way. Raises ``ValueError`` for one that names no known model or format, or not all five."""
    parts = text.split(":")
    if len(parts) != 5 or parts[0] not in EPOCHS or parts[4] not in FORMATS:
        raise ValueError(f"{text!r} is not MODEL:PRECISION:LEVEL:KIND:FORMAT, of {[*EPOCHS]} and {FORMATS}")
    return Way(*parts)


def say(**row: Any) -> None:
    """Print one row."""
    print(json.dumps(row), flush=True)


def network(model: str, memory_format: str, shape: tuple[int, int, int], classes: int) -> Any:
    """Make the example model, its weights in the memory format. Images of one channel are in both."""
    import torch

    from kway.zoo import get

    made = get(model)(shape, classes)
    return made.to(memory_format=torch.channels_last) if memory_format == "channels_last" else made


def step_kind(train: Callable[..., Any], kind: str) -> dict[str, str]:
    """Return the argument that asks for a step kind. Raises ``LookupError`` where this kway has eager steps only."""
    if "step_kind" in inspect.signature(train).parameters:
        return {"step_kind": kind}
    if kind == "eager":
        return {}
    raise LookupError(
        f"this kway has no step kinds: kway.train takes no step_kind, so {kind!r} cannot be asked for"
    )


def measure(way: Way, options: argparse.Namespace, source: Any) -> dict[str, Any]:
    """Train as a user does and return the row."""
    import torch
    from torch import nn

    import kway

    asked = step_kind(kway.train, way.step_kind)
    k = options.k
    # The batch of LeNet is global; ResNet-18 has one a device.
    own = SMOKE_BATCH if options.cpu else 256
    data = source.train if not options.cpu else _first(source.train, SMOKE_SAMPLES)
    job = kway.Job(
        name=way.model,
        model=partial(network, way.model, way.memory_format, source.shape, source.classes),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=LEARNING_RATES[way.model]),
        data=data,
        batch_size=own * (k if way.model == "resnet18" else 1),
        precision=way.precision,
    )
    begun = time.time()
    start: dict[str, float] = {}

    def listen(event: str, record: dict[str, Any]) -> None:
        if event == "start":
            start["to_first_step_s"] = time.time() - begun

    run = kway.train(
        job,
        devices=f"cpu:{k}" if options.cpu else "cuda:" + ",".join(map(str, range(k))),
        strategy="single" if k == 1 else "data",
        exactness=way.level,
        epochs=WARM_UP_EPOCHS + 2 if options.cpu else WARM_UP_EPOCHS + EPOCHS[way.model],
        callbacks=[listen],
        **asked,
    )
    record = run.record
    seconds = [epoch["seconds"] for epoch in record.epochs]
    steady = seconds[WARM_UP_EPOCHS:]
    spread = settled_spread(steady)
    return {
        **vars(way),
        "kind": "train",
        "way": str(way),
        # What ran: not always what was asked for, which ``way`` says.
        "step_kind": record.step_kind,
        "epoch_s": median(steady),
        "epoch_s_spread": spread,
        "epoch_s_of_epochs": seconds,
        "step_s": record.measured_step_s,
        # A record holds one step time for the run, so its spread is taken to be that of the epochs.
        "step_s_spread": spread,
        "input_wait_s": record.input_wait_s,
        "train_loss": [epoch["train_loss"] for epoch in record.epochs],
        "samples": len(data),
        "batch_size": record.batch_size,
        "steps": record.steps,
        "peak_memory_bytes": record.peak_memory_bytes,
        "weights_sha256": record.weights_sha256,
        "notices": record.notices,
        "wall_s": time.time() - begun,
        **start,
    }


def _first(data: Any, count: int) -> Any:
    import numpy as np

    return data.take(np.arange(count, dtype=np.int64))


def main() -> int:
    """Measure every way; one that fails takes no other with it. Exit code 1 where one did; refusals are said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="+", type=way_of, metavar="WAY")
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--data", type=Path, help="root of the data sets, with fashion-mnist/ in it")
    parser.add_argument("--cpu", action="store_true", help="a smoke run on CPU ranks: few samples, drawn")
    options = parser.parse_args()

    from kway.data import sources

    source = sources.load("synthetic") if options.cpu else sources.load("fashion-mnist", options.data)
    failed = False
    for way in options.ways:
        begun = time.monotonic()
        try:
            say(**measure(way, options, source))
        except (LookupError, RefusedError) as error:
            say(kind="left out", way=str(way), reason=str(error))
            print(f"{way}: left out: {error}", file=sys.stderr, flush=True)
        except Exception as error:
            failed = True
            traceback.print_exc()
            say(kind="failed", way=str(way), reason=f"{type(error).__name__}: {error}"[:2000])
        print(f"{way}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
