"""What the scripts of a checkout import is installed with it: named by itself, with its reason, and pinned."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Distributions that bring a module of another name.
BROUGHT_BY = {"mkdocs": "mkdocs-material"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_what_scripts_import_is_named_with_its_reason_and_pinned():
    scripts = [*(ROOT / "scripts").glob("*.py")]
    own = {"kway", "tests", *sys.stdlib_module_names, *(path.stem for path in scripts)}
    wanted = {BROUGHT_BY.get(name, name) for path in scripts for name in imported(path)} - own
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (line for lines in project["optional-dependencies"].values() for line in lines)
    named = {re.split(r"[><=\[]", line)[0] for line in (*project["dependencies"], *extras)}
    pinned = {
        line.partition("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    reasons = (ROOT / "docs/decisions/0002-dependencies.md").read_text()
    assert "nbclient" in wanted
    assert wanted <= named
    assert wanted <= pinned
    assert [name for name in wanted if not re.search(rf"\b{name}\b", reasons)] == []
