"""No block of code in a document is left out silently: it is run, or its first line says why not.

After the language: nothing for Python (it is run), ``output`` (of the Python before it), ``run``, ``slow: WHY`` (run by
``make test-docs``), ``checked: NAME`` (by that test), ``not run: WHY``.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.test_docs import ALL, GUIDE, blocks, files_of, prose

from kway.cli.main import commands

CONSOLE = ("sh", "bash", "console", "shell")
SAID = re.compile(r"(?P<how>slow|not run|checked): (?P<why>\S.*)")
DOCUMENTS = [path for path in ALL if path.name != "CHANGELOG.md"]
TYPED = re.compile(
    rf"^(?:\$ |(?:kway (?:{'|'.join(commands())})|python3?|torchrun|mpirun|pip|make) )", re.MULTILINE
)


def problem(info: str, text: str, tests: set[str]) -> str:
    """Say what is wrong with a block, empty where it is run or says why not."""
    language, _, rest = info.partition(" ")
    said = SAID.fullmatch(rest)
    if said and said["how"] == "checked" and said["why"] not in tests:
        return f"there is no test {said['why']}"
    if said and language in ("python", "text", *CONSOLE):
        return ""
    if language == "python":
        return "" if not rest else "run it, or say why not"
    if language in CONSOLE:
        return "" if rest == "run" else "say run, slow: WHY, checked: TEST or not run: WHY"
    if language == "text":
        if rest == "output":
            return ""
        return "a command is typed here: say how it is checked" if TYPED.search(text) or rest else ""
    return "" if language in ("json", "toml", "yaml") and not rest else "name the language"


def names_of_tests() -> set[str]:
    trees = [ast.parse(path.read_text()) for path in Path(__file__).parent.glob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_block_says_how_it_is_checked(path):
    tests = names_of_tests()
    found = [(block.line, said) for block in blocks(path) if (said := problem(block.info, block.text, tests))]
    assert not found, path.name
    # An indented block has no place to say it.
    assert not re.search(
        rf"^\n {{4,}}(?=\S)({TYPED.pattern[1:]}|import |from \w+ import )", prose(path), re.MULTILINE
    )


@pytest.mark.parametrize(
    ("info", "text", "wrong"),
    [
        ("python", "import kway\n", False),
        ("python not run: needs two machines", "import kway\n", False),
        ("python example", "import kway\n", True),
        ("sh", "kway devices\n", True),
        ("sh not run:", "kway devices\n", True),
        ("console slow: trains", "kway train lenet\n", False),
        ("text", "$ kway devices\n", True),
        ("text", "kway devices --json\n", True),
        ("text", "kway: error: no\n", False),
        ("text checked: test_texts_are_compared_as_meant", "$ kway devices\n", False),
        ("text checked: test_of_nothing", "$ kway devices\n", True),
        ("", "anything\n", True),
        ("json", "{}\n", False),
    ],
)
def test_blocks_that_say_nothing_are_found(info, text, wrong):
    assert bool(problem(info, text, names_of_tests())) == wrong


def typed(info: str, text: str) -> str:
    """Return what is typed in a block: all of a console's, and of a text what follows a prompt."""
    lines = text.splitlines()
    return "\n".join(
        lines if not info.startswith("text") else [line[2:] for line in lines if line.startswith("$ ")]
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "path",
    [path for path in GUIDE if any(" slow: " in block.info for block in blocks(path))],
    ids=lambda path: path.stem,
)
def test_slow_commands_run_in_the_order_of_the_document(path, tmp_path):
    files_of(path, tmp_path)
    here = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": here + os.pathsep + os.environ["PATH"]}
    for block in blocks(path):
        if re.match(r"\w+ (run|slow: )", block.info):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", typed(block.info, block.text)],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{path.name}:{block.line}\n{done.stdout}\n{done.stderr}"
