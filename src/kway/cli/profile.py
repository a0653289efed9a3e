"""``kway profile``: what a model costs on one device."""

import argparse
import shlex
from pathlib import Path

from kway.cli import options

HELP = "measure what a model costs on one device: time by share and by layer, flop, memory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    from kway.step.kinds import KINDS

    options.model(parser)
    options.loss(parser)
    options.training(parser)
    parser.add_argument(
        "--devices",
        default="auto",
        metavar="SET",
        help="auto, N, cpu:N or cuda:I,J: the set to prepare for, of which the first one computes (default auto: all)",
    )
    options.exactness(parser)
    parser.add_argument(
        "--step-kind",
        default="auto",
        metavar="KIND[,KIND]",
        help=f"{', '.join(KINDS)} (default auto: eager on a CPU, all of them on a GPU)",
    )
    options.settings(parser)
    options.micro_batch(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="about how long it may take; large models take longer (default 20)",
    )
    options.output(parser, "workload.json and workload.png")


def run(args: argparse.Namespace) -> int:
    """Profile; returns 0. Raises ``UsageError`` before anything is measured."""
    options.check_out(args, "workload.json", "workload.png")
    from kway.cli._begun import begun
    from kway.cli._job import says_that_data_is_usual
    from kway.jobs.folder import claimed
    from kway.jobs.profiling import profile
    from kway.report.workload import lines_of
    from kway.report.workload_plots import FILE, draw

    here = begun(args)
    folder = here.folder
    with claimed(folder, "workload.json", (FILE,)), says_that_data_is_usual(args, here.lines):
        record = profile(
            here.job,
            devices=args.devices,
            exactness=args.exactness,
            shards=args.shards,
            step_kind=args.step_kind,
            settings=options.settings_of(args.settings),
            seconds=args.seconds,
            say=here.say,
        )
        # Before its picture: what took minutes is not lost for a disk that is full.
        record.save(folder)
        drawn = draw(record, folder)
    if args.json:
        print(record.to_json())
        return 0
    print("\n".join(["", *lines_of(record), f"wrote      {folder}/: workload.json, {drawn.name}"]))
    if args.settings is None:
        # A plan is of steps without settings.
        print(f"next       {_next(args, folder, sorted({timing['devices'] for timing in record.timings}))}")
    return 0


def _next(args: argparse.Namespace, folder: Path, counts: list[int]) -> str:
    """Return the command that plans by this profile. ``counts``: the numbers of devices whose shares were timed."""
    from kway.cli._begun import again
    from kway.devices.select import parse
    from kway.devices.topology import discover
    from kway.planned import spelled_set
    from kway.strategies.levels import DEFAULT_SHARDS

    words = ["kway", "plan", args.model, "--workload", f"{folder}/workload.json", *again(args, "batch_size")]
    if args.devices != "auto":
        named = parse(args.devices, discover())
        words += ["--devices", " ".join(spelled_set(named[:count]) for count in counts)]
    if args.exactness != "math":
        words += ["--exactness", args.exactness]
    if args.shards != DEFAULT_SHARDS:
        words += ["--shards", str(args.shards)]
    if args.step_kind != "auto":
        words += ["--step-kind", args.step_kind]
    return shlex.join(words)
