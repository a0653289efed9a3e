"""``kway launch``: a user's own script on k devices."""

import argparse
import os
import re
import shlex
import sys
from pathlib import Path

from kway.cli import options

HELP = "run your own script on k devices"
# Scripts declare either; each gets the one that was asked for.
RANK_FLAGS = ("--local-rank", "--local_rank")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command. What follows the script is the script's."""
    flags = "[--devices SET] [--logs DIR] [--stall-timeout DURATION] [--init-method URL] [--local-rank]"
    parser.usage = f"kway launch {flags} (SCRIPT | -m MODULE) [ARGUMENTS ...]"
    parser.epilog = "Flags before the script are kway's, flags after it the script's."
    parser.add_argument(
        "--devices", default="auto", metavar="SET", help="auto, N, cpu:N or cuda:I,J (default: auto)"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="write what rank N prints to DIR/rank-N.log, too"
    )
    options.stall(parser)
    options.init_method(parser)
    for flag in RANK_FLAGS:
        parser.add_argument(
            flag,
            dest="rank_flag",
            action="store_const",
            const=flag,
            help="give the script this flag with its local rank, as scripts for torch's old launcher take it: "
            f"{flag}=0",
        )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    # Texts of every kind, also empty ones, which flags of kway's own may not be.
    rest = parser.add_argument(
        "arguments", type=str, nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the script's own"
    )
    rest.required = False  # or the message about a missing script would ask for these, too


def run(args: argparse.Namespace) -> int:
    """Run the script; returns 0 when all ranks did, and else the exit code of the rank that failed first.

    Raises ``UsageError``, before anything is started, for a script or devices that are not there, and for a
    folder of logs that cannot be written, and inside ranks that are there already.
    """
    from kway.devices.cpu import threads_for
    from kway.devices.select import parse, warnings
    from kway.devices.topology import discover
    from kway.launch import script
    from kway.launch.init_method import VARIABLE
    from kway.launch.init_method import parse as parse_method
    from kway.launch.temporary import check_temporary
    from kway.launch.torchrun import check_outside
    from kway.units import duration

    stall_timeout = duration("--stall-timeout", args.stall_timeout)
    _check_order(args)
    url, named = (
        (args.init_method, "--init-method") if args.init_method else (os.environ.get(VARIABLE, ""), VARIABLE)
    )
    method = parse_method(url, named) if url.strip() else None
    check_outside()
    script.check(args.script, args.module)
    cluster = discover()
    devices = parse(args.devices, cluster)
    if len(devices) == 1 and args.logs is None and stall_timeout is None:
        told = script.told_rank(args.rank_flag, 0)
        script.replace_this_process(args.script, [*told, *args.arguments], devices, module=args.module)
    for line in warnings(devices, cluster):
        print(f"kway: note: {line}", file=sys.stderr)
    if method is not None:
        script.check_meeting(method)
    if args.logs is not None:
        check_temporary()  # before there is a folder of logs of what could not start
        _make_folder(args.logs)
    on_cpu = devices[0] == "cpu"
    notes = script.launch(
        args.script,
        args.arguments,
        devices,
        module=args.module,
        threads=threads_for(len(devices), beside_gpu=not on_cpu),
        logs=args.logs,
        stall_timeout=stall_timeout,
        init_method=method,
        rank_flag=args.rank_flag,
    )
    for line in notes:
        print(f"kway: note: {line}", file=sys.stderr)
    return 0


def _check_order(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` for devices in the script's place; warn of flags that look like kway's, after the script."""
    from kway.errors import UsageError

    if re.fullmatch(r"auto|\d+|(cpu|cuda)(:[\d,]+)?", args.script) and not Path(args.script).exists():
        rest = shlex.join(args.arguments) or "SCRIPT"
        raise UsageError(
            f"no script {args.script}",
            "devices are named by a flag",
            f"kway launch --devices {args.script} {rest}",
        )
    given = {
        "--devices": args.devices != "auto",
        "--logs": args.logs,
        "--stall-timeout": args.stall_timeout,
        "--init-method": args.init_method,
    }
    twice = next((word for word in args.arguments if word.partition("=")[0] in RANK_FLAGS), "")
    if args.rank_flag and twice:
        raise UsageError(
            f"{args.rank_flag}, and {twice} after {args.script}",
            "each rank is to hear its own number, once",
            f"leave out {twice} after the script",
        )
    for word in args.arguments:
        flag = word.partition("=")[0]
        if flag in given and not given[flag]:
            print(
                f"kway: warning: {flag} after {args.script} is the script's own: kway's flags come before it",
                file=sys.stderr,
                flush=True,
            )


def _make_folder(folder: Path) -> None:
    from kway.errors import UsageError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rank-0.log").open("ab").close()
    except (OSError, ValueError) as error:  # a name that no folder can have is the latter
        raise UsageError(
            f"cannot write into {folder}", getattr(error, "strerror", None) or str(error)
        ) from None
