"""The command ``kway``: finds the commands, runs one, and turns errors into messages and exit codes.

A command is a file in this folder with ``HELP`` (one line), ``configure(parser)`` and ``run(args)``, which
returns the exit code. Only the parser of the command at hand is built, and commands import what is heavy
inside ``run``, so that the start stays fast.
"""

import argparse
import contextlib
import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kway.cli._parser import Parser
from kway.cli._screen import Screen, discard, screens
from kway.cli._version import ShowVersion
from kway.errors import KwayError, StoppedError
from kway.launch.descriptors import open_missing
from kway.launch.interrupt import (
    EndedBySignal,
    Interrupted,
    ignore_interrupts,
    ignore_wishes,
    signals_held,
    signals_raise,
)
from kway.launch.semaphores import cleared_quietly
from kway.registry import modules_of, unknown

# The order in which a new user meets them; commands that are not named here follow by name.
FIRST = ("devices", "measure", "profile", "plan", "train", "evaluate", "predict", "prove", "launch")
NOT_COMMANDS = ("main", "options")
# Commands that write no record.
ONLY_PRINT = ("devices", "evaluate", "completion")

# Commands to come.
ANNOUNCED = ("report",)

INTERRUPTED = 130
BROKEN_PIPE = 141
SUMMARY = (
    "Train a plain PyTorch model on any number of devices: the number changes the time, never the result."
)


def commands() -> list[str]:
    """List the names of all commands, in the order in which the help shows them."""
    names = [n for n in modules_of("kway.cli") if n not in NOT_COMMANDS and not n.startswith("_")]
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def parser_of(name: str) -> Parser:
    """Build the parser of a command, by a name that ``commands`` lists."""
    module = import_module(f"kway.cli.{name}")
    parser = Parser(prog=f"kway {name}", description=module.HELP)
    module.configure(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return the exit code.

    0: done. 1: the command failed, or a proof did. 2: the input cannot work, and nothing was written.
    75: told to stop, and can be gone on with. 130: interrupted. 141: whoever read the output went away. 128 + s:
    ended by signal s. Other codes are those of a failed rank.
    """
    if argv is None:
        open_missing()
        cleared_quietly()
    with screens() as screen, signals_raise(Interrupted):
        code = _run(list(sys.argv[1:] if argv is None else argv), screen, leaves=argv is None)
    if argv is None:
        # At its end Python looks for cycles among all objects. Torch's are a million, and go with the process.
        gc.freeze()
    return code


def _run(words: list[str], screen: Screen, leaves: bool) -> int:
    try:
        code, prints_result = _dispatch(words)
        # A closed pipe shows here, inside the try, and not at the interpreter's exit.
        print(end="", flush=True)
    except KwayError as error:
        with signals_held(leaving=True):
            if leaves and error.exit_code == StoppedError.exit_code:
                # Schedulers repeat themselves, and leaving takes a moment: this one has been obeyed. What the run held
                # goes with its traceback, and an exception must not come into the middle of that.
                ignore_wishes()
            _report(error)
        return error.exit_code
    except KeyboardInterrupt as ending:
        if leaves:
            # Pressed once more it would put torch's own traceback below the last line.
            ignore_interrupts()
        _say_end("interrupted", ending)
        return INTERRUPTED
    except EndedBySignal as ending:
        _say_end(f"ended by {ending.name}", ending)
        return 128 + ending.number
    except SystemExit as leaving:
        return _left(leaving)
    except BrokenPipeError:
        discard(sys.stdout)
        return BROKEN_PIPE
    # A run has written its record; an answer that is only printed is lost with the output.
    return code or int(screen.lost and prints_result)


def _left(leaving: SystemExit) -> int:
    """Say that the user's code left in this process before the command was through, and return the exit code."""
    code = leaving.code or 0
    what = f"with exit code {code}" if isinstance(code, int) else f"saying {code!r}"
    print(f"kway: error: left {what} before the work was done", file=sys.stderr)
    return (code & 0xFF if isinstance(code, int) else 0) or 1


def _say_end(what: str, ending: BaseException) -> None:
    print(": ".join([f"kway: {what}", *getattr(ending, "__notes__", [])]), file=sys.stderr)


def _dispatch(words: list[str]) -> tuple[int, bool]:
    """Run a command; return the exit code, and whether what it found out is only on standard output."""
    if not words or words[0].startswith("-"):
        top = _top_parser()
        code, _ = _parse(top, words)
        if code is None:
            top.print_help(sys.stderr)
            return 2, False
        return code, True
    name, rest = words[0], words[1:]
    names = commands()
    if name not in names:
        raise unknown("command", name, names, announced=ANNOUNCED)
    code, args = _parse(parser_of(name), rest)
    if code is not None:
        return code, True
    is_print_only = getattr(args, "json", False) or name in ONLY_PRINT
    return int(import_module(f"kway.cli.{name}").run(args)), is_print_only


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
    parser.add_argument("--version", action=ShowVersion, nargs=0, help=ShowVersion.HELP)
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
    if error.traceback:
        traceback = error.traceback.rstrip()
        print(traceback, file=sys.stderr)
        text = text.removeprefix(traceback).lstrip("\n")
        for note in getattr(error, "__notes__", []):
            print(f"kway: note: {note}", file=sys.stderr)
    if text.startswith("Traceback (most recent call last):"):
        # The user's own, which the message begins with.
        traceback, _, text = text.rpartition("\n")
        print(traceback.rstrip(), file=sys.stderr)
    print(f"kway: error: {text}", file=sys.stderr)
