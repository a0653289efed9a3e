"""``kway prove``: compares k devices with one, tensor by tensor."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from kway.cli import options

HELP = "prove that k devices give what one device gives"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.model(parser, precision="fp64, at level bits fp32")
    options.loss(parser)
    options.step(parser, several=True)
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="proof.json whose bits this machine must reproduce"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps to compare (default 3, and 6 for a step kind that records them)",
    )
    options.output(parser, "proof.json")


def run(args: argparse.Namespace) -> int:
    """Prove; returns 0 for a pass and 1 for a fail. Raises ``UsageError`` before anything starts."""
    options.check_out(args, "proof.json")
    from kway.cli._job import default_folder, job_of
    from kway.jobs.proving import prove
    from kway.report.tables import table
    from kway.units import ulps_text

    # A Job's own optimizer stays in the job: the proof says what it takes instead.
    is_job = _is_job(args.model)
    of_job = args.optimizer is None and args.lr is None and is_job
    if args.optimizer is None and not of_job:
        args.optimizer, args.lr = "momentum", 0.1 if args.lr is None else args.lr
    own_precision = args.precision is not None or args.exactness == "bits"
    if not own_precision and not is_job:
        args.precision = "fp64"  # the lines about a job that the flags describe say it
    job, lines = job_of(args)
    if is_job:
        lines.insert(1, f"precision  {job.precision if own_precision else 'fp64'}")
    folder = args.out or default_folder(f"{job.title}-proof")
    screen = sys.stderr if args.json else sys.stdout
    said: list[str] = []
    proof = prove(
        job,
        **options.placed(args),
        steps=args.steps,
        out=folder,
        precision=None if own_precision else "fp64",
        own_optimizer=not of_job,
        against=args.against,
        on_start=lambda warned: _begin(warned, said, lines, screen),
    )
    if args.json:
        print(proof.to_json())
    else:
        rows = [
            [
                row["strategy"],
                row["devices"],
                _shares(row["shares"]),
                row["equal"],
                ulps_text(row["max_ulps"]),
                row["tensors"],
            ]
            for row in proof.candidates
        ]
        print()
        print(table(["strategy", "devices", "last shares", "equal", "max ulps", "tensors"], rows))
    for row in proof.candidates:
        if row["reason"]:
            print(f"{row['strategy']} on {row['devices']}: {row['reason']}", file=screen)
    for text in proof.notices:
        if text not in said:
            print(f"note       {text}", file=screen)
    if proof.against is not None:
        print(
            f"against {proof.against['file']}: {proof.against['disagreement'] or 'equal bits'}", file=screen
        )
    print(f"verdict: {proof.verdict}; wrote {folder}/proof.json", file=screen)
    return 0 if proof.verdict == "pass" else 1


def _begin(warned: Sequence[str], said: list[str], lines: list[str], screen: TextIO) -> None:
    """Say what is proved, and what there is to note. ``said`` takes what the proof's notices need not say once more."""
    said += warned
    print("\n".join([*lines, *(f"note       {line}" for line in warned)]), file=screen, flush=True)


def _is_job(model: str) -> bool:
    from kway.cli._objects import is_reference, load_object
    from kway.job import Job

    return is_reference(model) and isinstance(load_object("model", model), Job)


def _shares(shares: list[list[int]] | None) -> str | None:
    return "+".join(map(str, shares[-1])) if shares else None
