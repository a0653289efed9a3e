"""``kway evaluate``: exact figures of trained weights over a data set."""

import argparse
import json
from pathlib import Path

from kway.cli import options

HELP = "loss and metrics of trained weights, every sample counted once"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.model(parser)
    options.loss(parser)
    options.placing(parser)
    parser.add_argument(
        "--weights", required=True, type=Path, metavar="FILE", help="safetensors file, or a run's folder"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns 0. Raises ``UsageError`` before anything starts."""
    from kway.cli._job import job_of
    from kway.jobs.evaluating import evaluate

    weights = weights_file(args.weights)
    job, lines = job_of(args)
    values = evaluate(job, weights, devices=args.devices, strategy=args.strategy)
    if args.json:
        print(
            json.dumps(
                {"kind": "evaluation", "schema": 1, "model": job.title, "weights": str(weights), **values}
            )
        )
        return 0
    print("\n".join(line for line in lines if line.startswith(("model", "data", "job", "note"))))
    for name, value in values.items():
        print(f"{name:<10} {value:.6g}")
    return 0


def weights_file(path: Path) -> Path:
    """Return the weights file that a path names. Raises ``UsageError`` where there is none."""
    from kway.errors import UsageError

    file = path / "weights.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"--weights {path}", f"no file {file}", "name a safetensors file, or the folder of a run"
        )
    return file
