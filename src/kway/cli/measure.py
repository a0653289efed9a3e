"""``kway measure``: what this machine does in how long."""

import argparse
import sys
import time

from kway.cli import options

HELP = "measure compute, memory, copies and collectives of this machine, beside their limits"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    from kway.measuring.names import names

    parser.add_argument(
        "--devices",
        default="auto",
        metavar="SET",
        help="auto, N, cpu:N or cuda:I,J, the CPU always with it (default auto)",
    )
    parser.add_argument("--only", metavar="NAME[,NAME]", help=f"some experiments: {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="a few sizes, in a minute at most")
    parser.add_argument(
        "--refresh", action="store_true", help="measure also what is remembered of this machine"
    )
    options.output(parser, "measurements.json", "measure")


def run(args: argparse.Namespace) -> int:
    """Measure; returns 0. Raises ``UsageError`` before anything is measured."""
    begun = time.perf_counter()  # loading torch is part of a quick measurement's minute
    options.check_out(args, "measurements.json")
    from kway.cli._job import default_folder
    from kway.jobs.folder import claimed
    from kway.jobs.measuring import measure
    from kway.measuring.names import names
    from kway.report.measured import lines_of
    from kway.report.measured_plots import draw

    screen = sys.stderr if args.json else sys.stdout
    folder = args.out or default_folder("measure")
    pictures = tuple(f"{name}.png" for name in names())
    with claimed(folder, "measurements.json", pictures):
        record = measure(
            devices=args.devices,
            only=args.only,
            quick=args.quick,
            refresh=args.refresh,
            since=begun,
            say=lambda text: print(text, file=screen, flush=True),
        )
        # Before its pictures: what took minutes is not lost for a disk that is full.
        record.save(folder)
        drawn = draw(record, folder)
    if args.json:
        print(record.to_json())
        return 0
    wrote = ", ".join(["measurements.json", *(path.name for path in drawn)])
    print("\n".join(["", *lines_of(record), f"wrote      {folder}/: {wrote}"]))
    return 0
