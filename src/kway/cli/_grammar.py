"""What can be typed, as data, read off the parsers: for documents and for the completion of shells."""

import argparse
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kway.cli.main import commands, parser_of


@dataclass(frozen=True)
class Flag:
    """A flag. ``value``: what its value is called, empty for a switch; ``optional``: it may be left out."""

    names: tuple[str, ...]
    dest: str
    value: str
    optional: bool
    path: bool
    required: bool
    default: Any
    help: str


@dataclass(frozen=True)
class Place:
    """An argument without a flag. ``rest``: it takes all that follows, flags as well; ``many``: any number of words."""

    dest: str
    name: str
    rest: bool
    many: bool
    default: Any
    help: str


@dataclass(frozen=True)
class Command:
    """A command with what it takes, in the order of its help."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    places: tuple[Place, ...]
    usage: str
    after: str


def grammar() -> list[Command]:
    """Read all commands, in the order of the help."""
    return [command_of(name) for name in commands()]


def command_of(name: str) -> Command:
    """Read one command."""
    parser = parser_of(name)
    flags = [a for a in parser._actions if a.option_strings]
    places = [a for a in parser._actions if not a.option_strings]
    return Command(
        name=name,
        help=import_module(f"kway.cli.{name}").HELP,
        flags=tuple(_flag(parser, action) for action in flags),
        places=tuple(
            Place(
                dest=action.dest,
                name=_named(action),
                rest=action.nargs == argparse.REMAINDER,
                many=action.nargs in ("*", "+"),
                default=action.default,
                help=_help(parser, action),
            )
            for action in places
        ),
        usage=parser.usage or "",
        after=parser.epilog or "",
    )


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> Flag:
    return Flag(
        names=tuple(action.option_strings),
        dest=action.dest,
        value="" if action.nargs == 0 else _named(action),
        optional=action.nargs == "?",
        path=action.type is Path or action.metavar in ("FILE", "DIR", "PATH"),
        required=action.required,
        default=action.default,
        help=_help(parser, action),
    )


def _named(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of an argument, with what argparse would put in for ``%(default)s`` and the like."""
    return (action.help or "") % {**vars(action), "prog": parser.prog}
