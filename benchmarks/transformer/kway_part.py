"""kway's side on k devices: prints a JSON row for each way to train, as soon as it is known.

A way is SIZE:LEVEL:KIND, like ``124m:loose:compiled-graph``.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "speed"))

from bars import settled_spread
from settings import SETTINGS, Setting, optimizer

from kway.errors import RefusedError
from kway.step.kinds import KINDS
from kway.strategies.levels import LEVELS


@dataclass(frozen=True)
class Way:
    """One way to train: what kway is asked for."""

    size: str
    level: str
    kind: str

    def __str__(self) -> str:
        return ":".join(vars(self).values())


def way_of(text: str) -> Way:
    """Read a way. Raises ``ValueError`` for one that names no known size, level or step kind."""
    size, level, kind = text.split(":")
    if size not in SETTINGS or level not in LEVELS or kind not in KINDS:
        raise ValueError(f"{text!r} is not SIZE:LEVEL:KIND")
    return Way(size, level, kind)


def measure(way: Way, setting: Setting, k: int, cpu: bool, **more: Any) -> dict[str, Any]:
    """Train as a user does and return the row. ``more``: other arguments of ``kway.train``."""
    from torch import nn

    import kway

    gc.collect()
    begun = time.time()
    start: dict[str, float] = {}

    def listen(event: str, record: dict[str, Any]) -> None:
        if event == "start":
            start["to_first_step_s"] = time.time() - begun

    run = kway.train(
        kway.Job(
            name=setting.name,
            model=setting.model(),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(optimizer, fused=not cpu),
            data=setting.data(k),
            batch_size=setting.batch * k,
            precision="fp32" if cpu else "bf16",
        ),
        devices=f"cpu:{k}" if cpu else "cuda:" + ",".join(map(str, range(k))),
        strategy="single" if k == 1 else "data",
        exactness=way.level,
        step_kind=way.kind,
        epochs=1 + setting.epochs,
        callbacks=[listen],
        **more,
    )
    record = run.record
    seconds = [epoch["seconds"] for epoch in record.epochs]
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    return {
        "kind": "kway",
        "way": str(way),
        "size": way.size,
        "level": way.level,
        "more": more,
        # What ran: not always what was asked for, which ``way`` says.
        "step_kind": record.step_kind,
        "step_s": record.measured_step_s,
        # A record holds one step time for the run, so its spread is taken to be that of the epochs.
        "spread": settled_spread(seconds[1:]),
        "epoch_s": seconds,
        "steps_of_epoch": setting.steps,
        "input_wait_s": record.input_wait_s,
        "flop": setting.flop(parameters),
        "parameters": parameters,
        "losses": [epoch["train_loss"] for epoch in record.epochs],
        "peak_memory_bytes": record.peak_memory_bytes,
        "notices": record.notices,
        "wall_s": time.time() - begun,
        **start,
    }


def main() -> int:
    """Measure every way; one that fails takes no other with it. Exit code 1 where one did; refusals are said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="+", type=way_of, metavar="WAY")
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="a smoke run on CPU ranks")
    parser.add_argument(
        "--more", type=json.loads, default={}, metavar="JSON", help="other arguments of kway.train, by name"
    )
    options = parser.parse_args()
    failed = False
    for way in options.ways:
        begun = time.monotonic()
        try:
            row = measure(way, SETTINGS[way.size], options.k, options.cpu, **options.more)
        except RefusedError as error:
            row = {"kind": "left out", "way": str(way), "reason": str(error)}
        except Exception as error:
            failed = True
            traceback.print_exc()
            row = {"kind": "failed", "way": str(way), "reason": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(row), flush=True)
        print(f"{way}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
