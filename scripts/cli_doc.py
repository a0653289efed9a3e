"""Write docs/cli.md: every command with its arguments, read off the parsers that run it.

With ``--check`` nothing is written, and the exit code says whether the file is as it would be written.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from kway.cli._grammar import Command, Flag, grammar

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Commands

Every command with its arguments, as `kway COMMAND --help` has them. This page is written by `scripts/cli_doc.py`.
`kway --version` shows [what a report of a bug needs](guide/install.md#what-a-report-of-a-bug-needs).
"""


def page() -> str:
    """Return the text of the page."""
    commands = grammar()
    rows = [f"| [`kway {c.name}`](#kway-{c.name}) | {_cell(c.help)} |" for c in commands]
    table = "\n".join(["| command | does |", "|---|---|", *rows])
    return "\n".join([HEAD, table, *("\n".join(_section(command)) for command in commands)])


def _section(command: Command) -> Iterator[str]:
    yield f"\n## kway {command.name}\n"
    yield f"{command.help[0].upper()}{command.help[1:]}.\n"
    if command.usage:
        yield f"Usage: `{command.usage}`\n"
    if command.after:
        yield f"{command.after}\n"
    yield "| argument | meaning |\n|---|---|"
    for place in command.places:
        yield f"| `{place.name}` | {_cell(place.help)} |"
    for flag in command.flags:
        needed = " (must be given)" if flag.required else ""
        yield f"| {_written(flag)} | {_cell(flag.help)}{needed} |"


def _written(flag: Flag) -> str:
    value = f" [{flag.value}]" if flag.optional else f" {flag.value}" if flag.value else ""
    return ", ".join(f"`{name}{value}`" for name in flag.names)


def _cell(text: str) -> str:
    """Escape what would end a cell, and what markdown would take for markup."""
    for mark in ("\\", "|", "*", "<"):
        text = text.replace(mark, f"\\{mark}")
    return text


def main() -> int:
    """Write the page, or with ``--check`` compare; return the exit code."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
