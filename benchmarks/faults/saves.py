"""How long training waits for a save every 100 steps: python saves.py [--devices SET] [--model NAME].

The device is idle between the end of the last step and the begin of the next; that is what is counted, on rank 0.
The first save also takes the memory for the copies.
"""

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from torch import nn

import kway
from kway.zoo import get

EVERY, SAVES = 100, 8


def main() -> None:
    """Train with saves; print one JSON line, and keep it in ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=256, help="samples a device")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--exactness", default="loose")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    count = torch.cuda.device_count() if options.devices == "auto" else len(options.devices.split(","))
    shape = (3, 32, 32) if options.model == "resnet18" else (1, 28, 28)
    batch = options.batch * max(1, count)
    draw = torch.Generator().manual_seed(0)
    job = kway.Job(
        model=partial(get(options.model), shape, 10),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        data=(
            torch.randn(4 * batch, *shape, generator=draw),
            torch.randint(10, (4 * batch,), generator=draw),
        ),
        batch_size=batch,
        precision=options.precision,
        name=options.model,
    )
    with tempfile.TemporaryDirectory() as place:
        run = kway.train(
            job,
            devices=options.devices,
            exactness=options.exactness,
            epochs=10**6,
            steps=EVERY * SAVES,
            log_every=EVERY,
            out=Path(place, "run"),
            checkpoint_every=f"{EVERY}steps",
            keep=2,
            echo=False,
            tune=False,
        )
        size = sum(
            p.stat().st_size for p in Path(place, "run", "checkpoints", f"step-{EVERY * SAVES}").iterdir()
        )
    record = run.record
    assert record.checkpoints is not None
    held, step_s = record.checkpoints["held_s"], record.measured_step_s or 0.0
    found = {
        "model": options.model,
        "devices": record.devices,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "global_batch": batch,
        "exactness": record.exactness,
        "bytes_a_save": size,
        "step_s": step_s,
        "held_s": held,
        "first_save_of_100_steps": held[0] / (EVERY * step_s),
        "median_save_of_100_steps": statistics.median(held[1:]) / (EVERY * step_s),
        "waited_for_the_save_before_s": record.checkpoints["waited_s"],
        "torch": str(torch.__version__),
    }
    print(json.dumps(found), flush=True)
    if options.out is not None:
        kept = json.loads(options.out.read_text()) if options.out.exists() else {}
        key = f"saves {options.model} {record.devices} {found['device']}"
        options.out.write_text(json.dumps({**kept, key: found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
