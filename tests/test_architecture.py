"""The rules of ARCHITECTURE.md, read off the source. Each rule is also tried on a tree that breaks it."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
# Lower rooms first. Rooms in one entry do not import each other, except on the ground floor.
GROUND = ("errors", "flat", "units", "records", "refused", "registry", "world", "job", "worker_deaths", "by_value",
          "paths", "forms", "measurements", "workload", "planned", "backends")  # fmt: skip
LAYERS = (
    GROUND,
    ("devices", "launch", "comm", "data", "checkpoints", "report", "trackers", "zoo", "cost"),
    ("step",),
    ("strategies", "measuring"),
    ("training", "planning", "elsewhere"),
    ("proving", "profiling"),
    ("tuning",),
    ("jobs",),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
REFERENCE_MUST_NOT_IMPORT = {"training", "comm", "strategies"}
WITHOUT_TORCH = {"", "__main__", "devices", "report", "trackers", "cost", "cli", *GROUND}
RANK_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR",
    "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
}  # fmt: skip
ENVIRONMENT_READERS = {"cli", "launch", "devices"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MUTATORS = {
    "append", "extend", "insert", "pop", "popitem", "clear", "update", "setdefault", "add", "remove", "discard",
}  # fmt: skip
PUBLIC = {
    "Job", "train", "evaluate", "predict", "prove", "parallel", "accuracy", "all_samples", "KwayError", "UsageError",
    "DataError", "RefusedError", "RankError", "StallError", "NonFiniteError", "MispairedError", "StoppedError",
    "ReplicaError", "OutOfMemoryError", "NotMeasuredError", "ItemError", "__version__", "tune", "measure", "profile",
    "plan", "map",
}  # fmt: skip

Problems = list[str]
Import = tuple[str, bool]


def sources(root: Path, *folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders or ("src/kway",):
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root), parsed(path, path.read_text())


@cache
def parsed(path: Path, text: str) -> ast.Module:
    """Read a file once for all rules: they only look."""
    return ast.parse(text, str(path))


def module_of(path: Path) -> str:
    """The dotted name within kway of a file below src/kway: "" for the package itself."""
    parts = path.with_suffix("").parts[2:]
    return ".".join(parts[:-1] if parts and parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


@cache
def imports(path: Path, tree: ast.Module) -> list[tuple[int, str, bool]]:
    """Return (line, absolute module name, whether it runs when the module is imported)."""
    package = ["kway", *module_of(path).split(".")] if module_of(path) else ["kway"]
    if path.name != "__init__.py":
        package = package[:-1]

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                origin = ".".join([*base, *([child.module] if child.module else [])])
                yield from ((child.lineno, f"{origin}.{alias.name}", at_import) for alias in child.names)
            elif isinstance(child, ast.Call) and _called(child).endswith("import_module"):
                for argument in child.args[:1]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield child.lineno, argument.value, at_import
                yield from walk(child, at_import)
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from walk(child, at_import and not lazy and not typing_only)

    return list(walk(tree, True))


def _called(call: ast.Call) -> str:
    """Return the name of what is called, with a dot before that of an attribute."""
    function = call.func
    return f".{function.attr}" if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def directions(root: Path) -> Problems:
    """Imports point downward only, wherever in a file they stand."""
    problems = []
    for path, tree in sources(root):
        own = room_of(module_of(path))
        if own and own not in LEVEL:
            problems.append(f"{path}: room {own!r} has no place in LAYERS")
            continue
        for line, target, _ in imports(path, tree):
            parts = target.split(".")
            if parts[0] != "kway" or len(parts) < 2 or parts[1] not in LEVEL:
                continue
            other = parts[1]
            if own == "":
                # The package itself hands out names of the front rooms, but only when asked.
                continue
            sideways = LEVEL[other] == LEVEL[own] and other != own and own not in GROUND
            if LEVEL[other] > LEVEL[own] or sideways:
                problems.append(f"{path}:{line}: {own} imports {other}")
            if other == "zoo" and own not in {"zoo", "cli"}:
                problems.append(f"{path}:{line}: only cli may import zoo")
            if path.parts[2:] == ("proving", "reference.py") and other in REFERENCE_MUST_NOT_IMPORT:
                problems.append(f"{path}:{line}: the reference imports {other}")
    return problems


def torch_free(root: Path) -> Problems:
    """Importing these rooms leads to torch on no path; report does not import it in a function either."""
    eager: dict[str, set[str]] = {}
    problems = []
    for path, tree in sources(root):
        module = module_of(path)
        for line, target, at_import in imports(path, tree):
            if at_import:
                eager.setdefault(module, set()).add(target)
            if room_of(module) == "report" and target.split(".")[0] == "torch":
                problems.append(f"{path}:{line}: report imports torch")
    known = {module_of(path) for path, _ in sources(root)}

    def leads_to_torch(module: str, seen: set[str]) -> bool:
        if module in seen:
            return False
        seen.add(module)
        for target in eager.get(module, ()):
            parts = target.split(".")
            if parts[0] == "torch":
                return True
            if parts[0] == "kway":
                # Importing a.b.c runs the packages a and a.b as well.
                names = [".".join(parts[1:end]) for end in range(1, len(parts) + 1)]
                if any(leads_to_torch(name, seen) for name in names if name in known):
                    return True
        return False

    for module in sorted(known):
        if room_of(module) in WITHOUT_TORCH and leads_to_torch(module, set()):
            problems.append(f"importing kway.{module} imports torch")
    return problems


def long_files(root: Path) -> Problems:
    files = [
        path for folder in ("src", "tests", "benchmarks", "scripts") for path in (root / folder).rglob("*.py")
    ]
    counted = [(path.relative_to(root), len(path.read_text().splitlines())) for path in sorted(files)]
    return [f"{path}: {lines} lines, at most {MAX_LINES}" for path, lines in counted if lines > MAX_LINES]


def vague_names(root: Path) -> Problems:
    files = [
        path for folder in ("src", "tests", "benchmarks", "scripts") for path in (root / folder).rglob("*")
    ]
    return [
        f"{path.relative_to(root)}: a file is named after its concept"
        for path in files
        if path.stem in VAGUE_NAMES
    ]


def rooms_without_docstring(root: Path) -> Problems:
    problems = []
    for folder in sorted({path.parent for path in (root / "src/kway").rglob("*.py")}):
        start = folder / "__init__.py"
        if not start.exists() or not ast.get_docstring(ast.parse(start.read_text())):
            problems.append(f"{folder.relative_to(root)}: no docstring in __init__.py")
    return problems


def branches_on_layouts(root: Path) -> Problems:
    """Nothing asks which axis or runner it has: no isinstance, type comparison or class pattern."""
    classes = {
        node.name
        for _, tree in sources(root, "src/kway/strategies")
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
    }

    def mentions(node: ast.AST) -> set[str]:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return classes & (names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)})

    problems = []
    for path, tree in sources(root):
        for node in nodes(tree):
            found: set[str] = set()
            if (
                isinstance(node, ast.Call)
                and _called(node) in {"isinstance", "issubclass"}
                and len(node.args) > 1
            ):
                found = mentions(node.args[1])
            elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
                found = mentions(node)
            elif isinstance(node, ast.MatchClass):
                found = mentions(node.cls)
            problems += [f"{path}:{node.lineno}: branches on {name}" for name in sorted(found)]
    return problems


def rank_variables(root: Path) -> Problems:
    """Names of rank variables stand in launch/ alone; devices/spelling.py lists them to mend misspellings."""
    return [
        f"{path}:{node.lineno}: {node.value} belongs to launch"
        for path, tree in sources(root)
        if room_of(module_of(path)) != "launch" and module_of(path) != "devices.spelling"
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in RANK_VARIABLES
    ]


def environment(root: Path) -> Problems:
    problems = []
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for path, tree in sources(root):
        if room_of(module_of(path)) in ENVIRONMENT_READERS:
            continue
        for node in nodes(tree):
            direct = (
                isinstance(node, ast.Attribute)
                and getattr(node.value, "id", "") == "os"
                and node.attr in names
            )
            named = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and names & {a.name for a in node.names}
            )
            if direct or named:
                problems.append(f"{path}:{node.lineno}: reads the environment")
    return problems


def module_state(root: Path) -> Problems:
    """No ``global``, and no function that changes a container of its module."""
    problems = []
    for path, tree in sources(root):
        assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        targets = [
            target
            for node in assigned
            for target in getattr(node, "targets", [getattr(node, "target", None)])
        ]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        for function in nodes(tree):
            if isinstance(function, ast.Global):
                problems.append(f"{path}:{function.lineno}: global {', '.join(function.names)}")
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                problems += [
                    f"{path}:{line}: changes module state {name}" for line, name in _changes(function, names)
                ]
    return problems


def _changes(function: ast.FunctionDef | ast.AsyncFunctionDef, names: set[str]) -> Iterator[tuple[int, str]]:
    inside = list(ast.walk(function))
    local = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    local |= {node.arg for node in inside if isinstance(node, ast.arg)}
    for node in inside:
        changed: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS
        ):
            changed = node.func.value
        if isinstance(changed, ast.Name) and changed.id in names - local:
            yield node.lineno, changed.id


RULES: list[Callable[[Path], Problems]] = [
    directions, torch_free, long_files, vague_names, rooms_without_docstring, branches_on_layouts,
    rank_variables, environment, module_state,
]  # fmt: skip

# For each rule, files of a small tree that break it once each, with what the complaint must say.
BROKEN: list[tuple[Callable[[Path], Problems], str, str, str]] = [
    (directions, "src/kway/data/x.py", "def f():\n    from kway.training import loop", "data imports training"),
    (directions, "src/kway/step/x.py", "from ..strategies import data", "step imports strategies"),
    (directions, "src/kway/comm/x.py", "import kway.launch.local", "comm imports launch"),
    (directions, "src/kway/training/x.py", "from kway.zoo import lenet", "only cli may import zoo"),
    (directions, "src/kway/errors.py", "from kway.data import order", "errors imports data"),
    (directions, "src/kway/proving/reference.py", "from kway import comm", "the reference imports comm"),
    (directions, "src/kway/launch/x.py", "import_module('kway.proving.run')", "launch imports proving"),
    (directions, "src/kway/cellar/x.py", "", "room 'cellar' has no place"),
    (torch_free, "src/kway/report/x.py", "def f():\n    import torch.nn", "report imports torch"),
    (torch_free, "src/kway/devices/x.py", "from torch import cuda", "importing kway.devices.x imports torch"),
    (torch_free, "src/kway/cli/x.py", "from kway.training import loop", "importing kway.cli.x imports torch"),
    (torch_free, "src/kway/__init__.py", "'''kway'''\nimport kway.training.loop", "importing kway. imports torch"),
    (long_files, "tests/x.py", "\n" * (MAX_LINES + 1), "401 lines"),
    (vague_names, "src/kway/data/utils.py", "", "named after its concept"),
    (rooms_without_docstring, "src/kway/data/__init__.py", "x = 1", "src/kway/data: no docstring"),
    (rooms_without_docstring, "src/kway/data/new/x.py", "", "src/kway/data/new: no docstring"),
    (branches_on_layouts, "src/kway/training/x.py", "isinstance(a, strategies.data.Data)", "branches on Data"),
    (branches_on_layouts, "src/kway/training/x.py", "if type(a) is Data: pass", "branches on Data"),
    (branches_on_layouts, "src/kway/training/x.py", "match a:\n    case Data(): pass", "branches on Data"),
    (rank_variables, "src/kway/training/x.py", "rank = environment['RANK']", "RANK belongs to launch"),
    (environment, "src/kway/training/x.py", "import os\nx = os.environ.get('A')", "reads the environment"),
    (environment, "src/kway/training/x.py", "from os import getenv", "reads the environment"),
    (module_state, "src/kway/training/x.py", "def f():\n    global a\n    a = 1", "global a"),
    (module_state, "src/kway/training/x.py", "CACHE = {}\ndef f(k):\n    CACHE[k] = 1", "changes module state CACHE"),
    (module_state, "src/kway/training/x.py", "seen: list = []\ndef f(k):\n    seen.append(k)", "module state seen"),
]  # fmt: skip


def plant(root: Path) -> None:
    """Write a small tree that keeps every rule."""
    for room in [room for rooms in LAYERS[1:-1] for room in rooms if room != "jobs"]:
        folder = root / "src/kway" / room
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text('"""A room."""\n')
    (root / "src/kway/__init__.py").write_text('"""kway"""\ndef f():\n    from kway.training import loop\n')
    (root / "src/kway/training/loop.py").write_text("import torch\nfrom kway.strategies.data import Data\n")
    (root / "src/kway/strategies/data.py").write_text("class Data: ...\n")
    (root / "src/kway/cli/train.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def run():\n    from kway.training import loop\n    from kway.zoo import lenet\n"
    )
    (root / "src/kway/launch/env.py").write_text("import os\nRANK = 'RANK'\nx = os.environ[RANK]\n")
    (root / "tests").mkdir()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Callable[[Path], Problems]) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_tree_keeps_the_rule(rule: Callable[[Path], Problems], tmp_path: Path) -> None:
    plant(tmp_path)
    assert rule(tmp_path) == []


@pytest.mark.parametrize(("rule", "file", "text", "complaint"), BROKEN)
def test_a_broken_tree_is_found(
    rule: Callable[[Path], Problems], file: str, text: str, complaint: str, tmp_path: Path
) -> None:
    plant(tmp_path)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    found = rule(tmp_path)
    assert any(complaint in problem for problem in found), found


def test_every_rule_has_a_broken_tree() -> None:
    assert {rule for rule, *_ in BROKEN} == set(RULES)


def test_public_names() -> None:
    import kway

    # What a star brings must not replace a name of Python's own.
    assert set(kway.__all__) == PUBLIC - {"map"}
    assert [name for name in sorted(PUBLIC) if not hasattr(kway, name)] == []
    # Importing a submodule sets its name on the package: a room called like a public name would replace it.
    rooms = {room_of(module_of(path)) for path, _ in sources(ROOT)}
    assert rooms & PUBLIC == set()


def test_importing_kway_imports_no_torch() -> None:
    code = "import sys, kway; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
