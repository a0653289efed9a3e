"""docs/cli.md is what the parsers say, and what the help of every command says."""

import importlib.util
from pathlib import Path

import pytest

from kway.cli._grammar import grammar
from kway.cli._version import lines
from kway.cli.main import main
from kway.devices.topology import discover

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("cli_doc", ROOT / "scripts/cli_doc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(text):
    """Take out what wraps and what markdown needs, so that help and page can be compared."""
    return "".join(text.replace("\\", "").split())


def test_the_page_is_what_would_be_written(script):
    assert script.PAGE.read_text() == script.page(), "run: python scripts/cli_doc.py"


@pytest.mark.parametrize("command", grammar(), ids=lambda command: command.name)
def test_the_page_agrees_with_help(command, script, capsys):
    assert main([command.name, "--help"]) == 0
    shown = plain(capsys.readouterr().out)
    section = script.PAGE.read_text().split(f"\n## kway {command.name}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(command.flags) + len(command.places)
    for said, meaning in rows:
        first = said.split("`")[1].partition(" ")[0]
        assert first in shown
        assert plain(meaning.removesuffix(" (must be given)")) in shown, said


def test_what_a_cell_cannot_hold_is_escaped(script):
    assert script._cell(r"a|b *c <d") == r"a\|b \*c \<d"


def test_version_is_as_it_is_shown():
    page = (ROOT / "docs/guide/install.md").read_text()
    block = page.split("test_version_is_as_it_is_shown\n")[1].split("```")[0]
    names = [line.split()[0] for line in lines(discover()) if not line.startswith("driver")]
    assert [line.split()[0] for line in block.splitlines()] == names
