"""``kway evaluate``: exact figures of trained weights over a data set."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kway.cli import options
from kway.registry import closest

if TYPE_CHECKING:
    from kway.job import Job

HELP = "loss and metrics of trained weights, every sample counted once"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.model(parser)
    options.loss(parser)
    options.placing(parser)
    options.init_method(parser)
    parser.add_argument(
        "--weights", required=True, type=Path, metavar="PATH", help="a run's folder, or a safetensors file"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns 0. Raises ``UsageError`` before anything starts."""
    from kway.cli._job import job_of
    from kway.jobs.alone import speaks
    from kway.jobs.evaluating import evaluate

    options.meet(args)
    weights = weights_file(args.weights)
    job, lines = job_of(args)
    where = {"devices": args.devices, "strategy": args.strategy}
    values = evaluate(job, weights, batch_size=args.batch_size, **where)
    if not speaks():
        return 0
    if args.json:
        print(
            json.dumps(
                {"kind": "evaluation", "schema": 1, "model": job.title, "weights": str(weights), **values}
            )
        )
        return 0
    print("\n".join(line for line in lines if line.startswith(("model", "data", "job", "note"))))
    print(on_what(job))
    for name, value in values.items():
        print(f"{name:<10} {value:.6g}")
    return 0


def on_what(job: "Job") -> str:
    """Say which samples are judged, and how many where that is known."""
    from kway.jobs.evaluating import judged
    from kway.units import counted

    samples = judged(job).order.samples
    count = "all samples" if samples is None else counted(samples, "sample")
    return f"on         {count} {'held out' if job.validation is not None else 'of the data'}"


def weights_file(path: Path) -> Path:
    """Return the weights file that a path names. Raises ``UsageError`` where there is none."""
    from kway.errors import UsageError
    from kway.paths import check_reachable, is_file

    check_reachable("--weights", path)
    file = path / "weights.safetensors" if path.is_dir() else path
    check_reachable("--weights", file)
    if not file.is_file():
        there = [each for each in _entries(path.parent) if is_file(each / "weights.safetensors")]
        files = [each for each in _entries(path.parent) if each.suffix == ".safetensors"]
        near = closest(path.name, [each.name for each in (*there, *files)])
        lacks = f" holds no {file.name}" if path.is_dir() else ": no such file or folder"
        raise UsageError(
            f"--weights {path}{lacks}",
            "",
            "name a run's folder or a safetensors file"
            + (f"; did you mean {path.with_name(near)}?" if near is not None else ""),
        )
    return file


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
