"""``kway tune``: which way to take the steps of a model is fastest on this machine."""

import argparse

from kway.cli import options

HELP = "find the fastest way to run a model's steps here, for the runs that follow"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    options.model(parser)
    options.loss(parser)
    options.step(parser, tunes=True)
    parser.add_argument(
        "--tune-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="what would take longer than is left of S seconds is not begun (default 60)",
    )
    parser.add_argument("--allow", metavar="P[,P]", help="precisions that may be chosen beside the job's own")
    parser.add_argument("--refresh", action="store_true", help="measure also what is known already")
    options.init_method(parser)
    options.output(parser, "tune.json")


def run(args: argparse.Namespace) -> int:
    """Tune; returns 0. Raises ``UsageError`` before anything starts."""
    # First: whether other ranks are there depends on it.
    options.meet(args)
    options.check_out(args, "tune.json")
    from kway.cli._begun import begun
    from kway.cli._job import says_that_data_is_usual
    from kway.jobs.tuning import tune
    from kway.report.tuning import lines_of

    here = begun(args)
    folder = here.folder
    with says_that_data_is_usual(args, here.lines):
        record = tune(
            here.job,
            **options.placed(args),
            seconds=args.tune_seconds,
            allow=[name for name in (args.allow or "").split(",") if name],
            refresh=args.refresh,
            out=folder,
            say=here.say,
        )
    if args.json:
        print(record.to_json())
        return 0
    # One that another rank writes may bear another name.
    wrote = [f"wrote      {folder}/tune.json"] if (folder / "tune.json").exists() else []
    print("\n".join(["", *lines_of(record), *wrote]))
    return 0
