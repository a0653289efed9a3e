"""What users install: the wheel holds the package and what it reads, and nothing else."""

import importlib.util
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import kway

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("dist", ROOT / "scripts/dist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(built[1]) as packed:
        return {name: packed.read(name).decode() for name in packed.namelist()}


def in_source():
    files = [
        path for path in (ROOT / "src/kway").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    return {path.relative_to(ROOT / "src").as_posix() for path in files}


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    names = {name for name in wheel if ".dist-info/" not in name}
    assert names == in_source()
    assert "kway/py.typed" in names
    assert {name for name in names if name.endswith(".json")} >= {"kway/elsewhere/machines/8xh100.json"}
    assert not [name for name in wheel if "test" in Path(name).parts[0]]


def test_the_wheel_says_what_it_is(wheel):
    folder = f"kway-{kway.__version__}.dist-info"
    said = Parser().parsestr(wheel[f"{folder}/METADATA"])
    assert (said["Name"], said["Version"]) == ("kway", kway.__version__)
    assert {"demo", "dev", "docs"} <= set(said.get_all("Provides-Extra"))
    assert said.get_payload().startswith("# kway")
    assert "kway = kway.cli.main:main" in wheel[f"{folder}/entry_points.txt"]
    assert wheel[f"{folder}/top_level.txt"].split() == ["kway"]
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert "Tag: py3-none-any" in wheel[f"{folder}/WHEEL"]


def test_the_source_archive_holds_what_tests_and_documents_need(built):
    with tarfile.open(built[0]) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    needed = {"Makefile", "constraints.txt", "mkdocs.yml", "scripts/setup.py", "docs/guide/first-run.md"}
    assert needed | {f"src/{name}" for name in in_source()} <= names
    assert "tests/packaging/test_dist.py" in names
    assert not [
        name for name in names if "__pycache__" in name or name.startswith((".git/", "runs/", "dist/"))
    ]


def test_the_version_is_said_once(wheel):
    assert f'version = "{kway.__version__}"' in (ROOT / "pyproject.toml").read_text()
