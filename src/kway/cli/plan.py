"""``kway plan``: which layout on how many devices is fastest for a model, and why."""

import argparse
import shlex
from pathlib import Path

from kway.cli import options

HELP = "predict every layout on every number of devices: which is fastest, and why"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.model(parser)
    options.loss(parser)
    options.training(parser)
    options.micro_batch(parser)
    parser.add_argument(
        "--batch-size-per-device",
        type=int,
        metavar="N",
        help="weak scaling: the global batch is N times the number of devices (--batch-size: the same for all)",
    )
    parser.add_argument(
        "--devices",
        default="auto",
        metavar="SET",
        help="auto: every number of GPUs and of CPU ranks; or sets: 1,2,3 or 'cpu:2 cuda:0,1' (default auto)",
    )
    parser.add_argument(
        "--strategy",
        default="auto",
        metavar="NAME[,NAME]",
        help="auto: all; or single, data, threads, or with a size, data=2 (default auto)",
    )
    parser.add_argument(
        "--step-kind",
        default="auto",
        metavar="KIND[,KIND]",
        help="auto: all, on a CPU those that need no compiler; or eager, compiled, graph, compiled-graph",
    )
    options.exactness(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="run each candidate as kway train does, in turns: what was measured fastest is the plan, which shows how "
        "far the predictions are off",
    )
    parser.add_argument(
        "--on",
        metavar="MACHINE",
        help="plan for GPUs of a machine that is not here (an estimate): 8xa100, 8xh100, 64x8xh100, or the path of a "
        "description",
    )
    parser.add_argument(
        "--workload", type=Path, action="append", metavar="FILE", help="of kway profile; not profiled again"
    )
    parser.add_argument(
        "--measurements", type=Path, metavar="FILE", help="of kway measure; in place of those remembered"
    )
    parser.add_argument("--refresh", action="store_true", help="profile and measure also what is remembered")
    options.output(parser, "plan.json, speedup.png, terms.png")


def run(args: argparse.Namespace) -> int:
    """Plan; returns 0. Raises ``UsageError`` before anything starts, and where the model fits nowhere."""
    options.check_out(args, "plan.json", "speedup.png", "terms.png")
    from kway.cli._begun import begun
    from kway.cli._job import says_that_data_is_usual
    from kway.errors import UsageError
    from kway.jobs.planning import plan
    from kway.report.plan_plots import draw
    from kway.report.plans import lines_of

    if args.batch_size is not None and args.batch_size_per_device is not None:
        raise UsageError("--batch-size and --batch-size-per-device", "only one of them", "leave one out")
    here = begun(args)
    folder = here.folder
    with says_that_data_is_usual(args, here.lines):
        record = plan(
            here.job,
            devices=args.devices,
            strategy=args.strategy,
            exactness=args.exactness,
            shards=args.shards,
            step_kind=args.step_kind,
            batch_size_per_device=args.batch_size_per_device,
            check=args.check,
            on=args.on,
            workload=args.workload,
            measurements=args.measurements,
            refresh=args.refresh,
            out=folder,
            say=here.say,
        )
    drawn = draw(record, folder)
    if args.json:
        print(record.to_json())
        return 0
    wrote = ", ".join(["plan.json", *(path.name for path in drawn)])
    print("\n".join(["", *lines_of(record), f"wrote      {folder}/: {wrote}"]))
    if record.estimate_only:
        return 0
    best = record.best
    # What cannot be is nothing to go by; what was measured is.
    doubted = any(row.get("doubtful") for row in record.candidates) and not best.get("measured_step_s")
    print(f"next       {_anew(args) if doubted else _next(args, folder, record.level, best['batch_size'])}")
    return 0


def _anew(args: argparse.Namespace) -> str:
    """Return the command that finds out anew what this plan rests on, and what to wait for before; measurements that
    were handed in stay. Into another folder: the one that was named holds a plan.
    """
    from kway.cli._begun import repeated
    from kway.devices import busy
    from kway.devices.topology import discover

    command = shlex.join([*repeated("plan", args, but=("workload", "refresh", "out")), "--refresh"])
    others = busy.taken(discover().cpu["usable"])
    return (
        f"wait until other programs are done (they keep {others} busy), then {command}" if others else command
    )


def _next(args: argparse.Namespace, folder: Path, level: str, batch: int) -> str:
    """Return the command that trains as it was planned, with a global ``batch``."""
    from kway.cli._begun import again

    words = ["kway", "train", args.model, "--plan", f"{folder}/plan.json", *again(args)]
    if args.batch_size is not None or args.batch_size_per_device is not None:
        # A job may have another one of its own.
        words += ["--batch-size", str(batch)]
    # A plan never lowers the level of a run, which is math where nobody says another.
    return shlex.join(words + (["--exactness", level] if level == "loose" else []))
