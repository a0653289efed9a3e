"""One measurement with kway in a process of its own: prints JSON lines, each as soon as it is known.

Started by run.py. ``--since`` is the time (seconds since the epoch) at which the command was given, so that
start-up counts everything: Python, torch, data, ranks.
"""

import argparse
import json
import platform
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

SMOKE_SAMPLES = 48
LEARNING_RATES = {"lenet": 0.2, "resnet18": 0.1}
PROOF_BATCHES = {"lenet": 13, "resnet18": 7}


def say(**row: Any) -> None:
    """Print one row. What is not a number in JSON becomes null."""
    print(json.dumps(row), flush=True)


def device_set(options: argparse.Namespace, count: int) -> str:
    """Name the first ``count`` devices."""
    return f"cpu:{count}" if options.cpu else "cuda:" + ",".join(map(str, range(count)))


def machine(options: argparse.Namespace) -> None:
    """Say what was measured on: the devices as kway sees them, and the versions of what ran."""
    import torch

    import kway
    from kway.devices import torch_facts
    from kway.devices.topology import discover

    facts = torch_facts.remember()
    cluster = discover().to_dict()
    say(
        gpus=[gpu["name"] for gpu in cluster["gpus"]],
        processor=cluster["cpu"]["model"],
        usable_cores=cluster["cpu"]["usable"],
        driver=cluster["driver"],
        versions={
            "kway": kway.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": facts["nccl"],
            "python": platform.python_version(),
        },
        cluster=cluster,
    )


def job_of(options: argparse.Namespace, model: str, **changes: Any) -> Any:
    """Make the job of a seed on Fashion-MNIST; small and drawn data in a smoke run."""
    import torch
    from torch import nn

    import kway
    from kway.data import sources
    from kway.zoo import get

    source = sources.load("synthetic") if options.cpu else sources.load("fashion-mnist", options.data)
    train, held = (
        [part.take(range_of(SMOKE_SAMPLES)) for part in (source.train, source.validation)]
        if options.cpu
        else (source.train, source.validation)
    )
    return kway.Job(
        **{
            "name": model,
            "model": partial(get(model), source.shape, source.classes),
            "loss": nn.CrossEntropyLoss(),
            "optimizer": partial(torch.optim.SGD, lr=LEARNING_RATES[model]),
            "data": train,
            "validation": held,
            "batch_size": 256,
            "metrics": {"accuracy": kway.accuracy},
            **changes,
        }
    )


def range_of(count: int) -> Any:
    """Return the indices of the first ``count`` samples."""
    import numpy as np

    return np.arange(count, dtype=np.int64)


def train(options: argparse.Namespace) -> None:
    """Train one seed on k devices and print its row; a row with the start-up comes first."""
    import torch

    import kway

    k = options.k
    # The seed's batch of 256 is global for LeNet; ResNet-18 has 256 a device, and a learning rate to match.
    grows = options.model == "resnet18"
    own = 8 if options.cpu else 256
    rate = LEARNING_RATES[options.model] * (k if grows else 1)
    job = job_of(
        options,
        options.model,
        batch_size=own * k if grows else own,
        optimizer=partial(torch.optim.SGD, lr=rate),
        precision=options.precision,
    )
    start: dict[str, float] = {}

    def listen(event: str, record: dict[str, Any]) -> None:
        if event == "start":
            start["to_first_step_s"] = time.time() - options.since
        elif event == "step" and "to_logged_step_s" not in start:
            start["to_logged_step_s"], start["logged_step"] = time.time() - options.since, record["step"]
            say(kind="start", **start)
        elif event == "epoch":
            say(kind="epoch", **record)

    run = kway.train(
        job,
        devices=device_set(options, k),
        strategy="single" if k == 1 else "data",
        exactness=options.level,
        epochs=options.epochs,
        callbacks=[listen],
        tune=False,
    )
    record = run.record
    seconds = [epoch["seconds"] for epoch in record.epochs]
    steady = seconds[1:] or seconds
    say(
        kind="train",
        model=options.model,
        strategy=record.strategy,
        level=record.exactness,
        precision=record.precision,
        batch_size=record.batch_size,
        lr=rate,
        epochs=len(seconds),
        accuracy=[epoch["accuracy"] for epoch in record.epochs],
        train_loss=[epoch["train_loss"] for epoch in record.epochs],
        epoch_s=median(steady),
        epoch_s_of_epochs=seconds,
        spread=(max(steady) - min(steady)) / median(steady),
        step_s=record.measured_step_s,
        input_wait_s=record.input_wait_s,
        peak_memory_bytes=record.peak_memory_bytes,
        weights_sha256=record.weights_sha256,
        wall_s=time.time() - options.since,
        notices=record.notices,
        **start,
    )


def prove(options: argparse.Namespace) -> None:
    """Prove both seeds in float64 and float32, one row for each pair of model and precision."""
    import kway

    # One reference serves all counts.
    counts = sorted({1, min(2, options.k), options.k})
    for model in options.models.split(","):
        for precision in ("fp64", "fp32"):
            begun = time.perf_counter()
            try:
                proof = kway.prove(
                    job_of(options, model, batch_size=PROOF_BATCHES[model], validation=None),
                    devices=" ".join(device_set(options, count) for count in counts),
                    strategy="data",
                    precision=precision,
                )
            except Exception as error:  # one proof that breaks must not take the others with it
                say(
                    kind="proof",
                    model=model,
                    precision=precision,
                    verdict="error",
                    reason=f"{error!r}"[:2000],
                )
                continue
            say(
                kind="proof",
                model=model,
                precision=precision,
                verdict=proof.verdict,
                batch_size=proof.batch_size,
                steps=proof.steps,
                candidates=proof.candidates,
                seconds=time.perf_counter() - begun,
            )


def main() -> int:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["machine", "train", "prove"])
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--model", choices=LEARNING_RATES)
    parser.add_argument("--models", default="lenet,resnet18")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--level", default="math")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--since", type=float, default=time.time())
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    {"machine": machine, "train": train, "prove": prove}[options.part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
