"""The command ``kway``: finds the commands, runs one, and turns errors into messages and exit codes.

A command is a file in this folder with ``HELP`` (one line), ``configure(parser)`` and ``run(args)``, which
returns the exit code. Only the parser of the command at hand is built, and commands import what is heavy
inside ``run``, so that the start stays fast.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kway import __version__
from kway.cli._parser import Parser
from kway.errors import KwayError, RankError
from kway.registry import modules_of, unknown

# The order in which a new user meets them; commands that are not named here follow by name.
FIRST = ("devices", "train", "evaluate", "predict", "prove", "launch")
NOT_COMMANDS = ("main", "options")

INTERRUPTED = 130
BROKEN_PIPE = 141
SUMMARY = (
    "Train a plain PyTorch model on any number of devices: the number changes the time, never the result."
)


def commands() -> list[str]:
    """List the names of all commands, in the order in which the help shows them."""
    names = [n for n in modules_of("kway.cli") if n not in NOT_COMMANDS and not n.startswith("_")]
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return the exit code.

    0: done. 1: the command failed, or a proof did. 2: the input cannot work, and nothing was written.
    130: interrupted. 141: whoever read the output went away. Other codes are those of a failed rank.
    """
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        # A closed pipe shows here, inside the try, and not at the interpreter's exit.
        print(end="", flush=True)
    except KwayError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("kway: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        top = _top_parser()
        code, _ = _parse(top, words)
        if code is None:
            top.print_help(sys.stderr)
            return 2
        return code
    name, rest = words[0], words[1:]
    names = commands()
    if name not in names:
        raise unknown("command", name, names)
    module = import_module(f"kway.cli.{name}")
    parser = Parser(prog=f"kway {name}", description=module.HELP)
    module.configure(parser)
    code, args = _parse(parser, rest)
    return int(module.run(args)) if code is None else code


def _top_parser() -> Parser:
    names = commands()
    width = max(len(name) for name in names)
    lines = [f"  {name:{width}}  {import_module(f'kway.cli.{name}').HELP}" for name in names]
    parser = Parser(
        prog="kway",
        usage="kway [-h] [--version] COMMAND ...",
        description=SUMMARY,
        epilog="\n".join(["commands:", *lines, "", "kway COMMAND --help tells more about one."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kway {__version__}")
    return parser


def _parse(parser: Parser, words: list[str]) -> tuple[int | None, Any]:
    """Return (``None``, arguments), or the exit code that help and version end with and ``None``."""
    try:
        return None, parser.read(words)
    except SystemExit as leaving:
        return (leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1), None


def _report(error: KwayError) -> None:
    """Print an error on standard error: a rank's own traceback first, the cause in the last line."""
    text = str(error)
    with contextlib.suppress(OSError, ValueError):
        print(end="", flush=True)
    if isinstance(error, RankError) and error.traceback:
        traceback = error.traceback.rstrip()
        print(traceback, file=sys.stderr)
        text = text.removeprefix(traceback).lstrip("\n")
    print(f"kway: error: {text}", file=sys.stderr)


def _discard_output() -> None:
    """Let the interpreter's own flush at exit go nowhere instead of failing once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
