"""What the documentation says is run: its code, its commands, its messages, its links.

In a fenced block, ``text output`` is what the Python block before it prints, ``sh run`` is run and must succeed,
and a Python block whose first line is ``# NAME.py`` is also the file of that name. What else a block may say is in
test_blocks.py.
"""

import argparse
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.commands import forking_commands

import kway
from kway.cli.main import commands, main
from kway.data import sources
from kway.data.parts import take_apart
from kway.data.share import outline
from kway.devices.topology import discover
from kway.elsewhere.description import Machine
from kway.jobs.proving import STEPS, draw
from kway.measurements import Measurements
from kway.planned import Planned
from kway.records import Cluster, Plan, Proof, Training, Tuning
from kway.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
GUIDE = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/guide").glob("*.md")),
]
OTHERS = [
    ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
]
ALL = [*GUIDE, *OTHERS, *sorted((ROOT / "docs/decisions").glob("*.md"))]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")

# Runs the blocks of every document, each in a namespace and a folder of its own, and prints as JSON what each
# block printed. One process for all: starting torch takes longer than most of what the blocks do. For the same
# reason it is forked, and its ranks, but for the README: that runs as it does for its readers.
DRIVER = """
import contextlib, io, json, os, sys, traceback
results = {}
for name, (folder, code) in json.load(open(sys.argv[1])).items():
    os.chdir(folder)
    sys.path.insert(0, folder)
    namespace, printed, error = {"__name__": "__main__"}, [], ""
    for place, text in code:
        shown = io.StringIO()
        try:
            with contextlib.redirect_stdout(shown):
                exec(compile(text, place, "exec"), namespace)
        except BaseException:
            error = traceback.format_exc()
            break
        printed.append(shown.getvalue())
    sys.path.remove(folder)
    results[name] = printed, error
print("PRINTED" + json.dumps(results))
"""


@dataclass(frozen=True)
class Block:
    line: int
    info: str
    text: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [Block(text[: m.start()].count("\n") + 1, m[1], m[2]) for m in FENCE.finditer(text)]


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def called(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (place, words) of every shell command of a document, in sh blocks and after a prompt."""
    for block in blocks(path):
        for offset, line in enumerate(block.text.splitlines(), block.line + 1):
            text = line if block.info.startswith("sh") else line[2:] if line.startswith("$ ") else ""
            words = shlex.split(text.partition(" > ")[0], comments=True)
            if words:
                yield f"{path.name}:{offset}", words


def files_of(path: Path, folder: Path) -> None:
    for block in blocks(path):
        name = re.match(r"# (\w+\.py)\n", block.text)
        if block.info == "python" and name:
            (folder / name[1]).write_text(block.text)


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False, exit_on_error=False)
    import_module(f"kway.cli.{command}").configure(parser)
    return parser


def same(got: str, said: str) -> bool:
    """Whether two texts agree, their decimals to 2 percent: another torch may round otherwise."""
    if NUMBER.sub("#", got).split() != NUMBER.sub("#", said).split():
        return False
    pairs = zip(NUMBER.findall(got), NUMBER.findall(said), strict=True)
    return all(float(a) == pytest.approx(float(b), rel=0.02) for a, b in pairs)


def test_texts_are_compared_as_meant():
    assert same("loss 0.1714\n", "loss 0.1715")
    assert not same("loss 0.18", "loss 0.1714")
    assert not same("loss 0.1714 x", "loss 0.1714")
    assert not same("3 rows", "4 rows")


def test_there_is_something_to_check():
    assert len(GUIDE) > 5
    assert sum(block.info == "python" for path in GUIDE for block in blocks(path)) > 5
    assert sum(block.info == "text output" for path in GUIDE for block in blocks(path)) > 5
    assert len(list(called(ROOT / "README.md"))) > 3
    for path in ALL:
        assert path.read_text().count("```") == 2 * len(blocks(path)), f"{path.name}: a block is not closed"


def run_blocks(paths, root):
    """Map each document to what its Python blocks printed, and the traceback of the one that failed."""
    work = {}
    for path in paths:
        code = [(f"{path.name}:{b.line}", b.text) for b in blocks(path) if b.info == "python"]
        folder = root / path.stem
        folder.mkdir()
        files_of(path, folder)
        work[path.name] = str(folder), code
    (root / "driver.py").write_text(DRIVER)
    (root / "work.json").write_text(json.dumps(work))
    words = [sys.executable, str(root / "driver.py"), str(root / "work.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("PRINTED")[2])


@pytest.fixture(scope="module")
def ran(tmp_path_factory, zygotes):
    with forking_commands(zygotes):
        others = run_blocks(
            [path for path in GUIDE if path.name != "README.md"], tmp_path_factory.mktemp("blocks")
        )
    return others | run_blocks([ROOT / "README.md"], tmp_path_factory.mktemp("readme"))


@pytest.mark.starts
@pytest.mark.parametrize("path", GUIDE, ids=lambda path: path.stem)
def test_python_runs_and_prints_what_is_said(path, ran):
    printed, error = ran[path.name]
    assert not error, error
    assert len(printed) == sum(block.info == "python" for block in blocks(path))
    outputs = iter(printed)
    got = ""
    for block in blocks(path):
        if block.info == "python":
            got = next(outputs)
        elif block.info == "text output":
            assert same(got, block.text), f"{path.name}:{block.line} says\n{block.text}but it printed\n{got}"


@pytest.mark.starts
@pytest.mark.parametrize("path", GUIDE, ids=lambda path: path.stem)
def test_commands_that_are_meant_to_run_do(path, tmp_path, request):
    if path.name != "README.md":  # as for Python blocks
        request.getfixturevalue("forked_commands")
    files_of(path, tmp_path)
    ran = 0
    for block in blocks(path):
        for line in block.text.splitlines() if block.info == "sh run" else []:
            words = shlex.split(line, comments=True)
            assert words[0] == "kway"
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            assert done.returncode == 0, f"{path.name}:{block.line}: {line}\n{done.stderr}"
            ran += 1
    if not ran:
        pytest.skip("no block marked to run")


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_commands_are_ones_that_exist(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for place, words in called(path):
        if words[0] == "make":
            assert set(words[1:]) <= targets, f"{place}: make has {sorted(targets)}"
        if words[0] != "kway":
            continue
        assert words[1] in commands(), f"{place}: kway has {commands()}"
        try:
            parser_of(words[1]).parse_args(words[2:])
        except (argparse.ArgumentError, SystemExit) as error:
            pytest.fail(f"{place}: {shlex.join(words)}: {error}")


def section(title):
    return re.split(
        r"^## ", (ROOT / "docs/guide/records.md").read_text().partition(f"## {title}\n")[2], flags=re.M
    )[0]


def keys(value: object, free: Iterable[str]) -> Iterator[str]:
    """Yield every key of nested records but those inside of ``free`` ones, whose keys are the user's or torch's."""
    for name, item in value.items() if isinstance(value, dict) else []:
        yield name
        yield from () if name in free else keys(item, free)
    for item in value if isinstance(value, list) else []:
        yield from keys(item, free)


RECORDS = {
    "train.json": Training,
    "proof.json": Proof,
    "tune.json": Tuning,
    "measurements.json": Measurements,
    "machine.json": Machine,
    "workload.json": Workload,
    "plan.json": Planned,
    "cluster.json": Cluster,
    "The plan": Plan,
}


@pytest.mark.parametrize("title", RECORDS)
def test_every_field_of_a_record_is_explained(title):
    missing = [entry.name for entry in fields(RECORDS[title]) if f"`{entry.name}`" not in section(title)]
    assert not missing


def test_what_is_inside_of_a_field_is_explained(tmp_path):
    x = torch.randn(9, 3)
    job = kway.Job(torch.nn.Linear(3, 1), torch.nn.MSELoss(), torch.optim.SGD, (x, x[:, :1]), (x, x[:, :1]))
    more = {"devices": "cpu:1", "echo": False, "exactness": "bits"}
    run = kway.train(job, epochs=1, out=tmp_path, save_best="validation_loss", checkpoint_every=1, **more)
    proofs = [kway.prove(job, **(more | {"exactness": level}), steps=1) for level in ("bits", "math")]
    free = {"layout", "versions", "groups", "steps", "remembered", "gradients", "step_kinds_left"}
    proof = section("train.json") + section("proof.json")  # which says of some fields: as in train.json
    for text, record in (
        (section("train.json"), run.record),
        *((proof, found) for found in proofs),
        (section("cluster.json"), discover()),
        (section("measurements.json"), kway.measure(devices="cpu", only="offload", quick=True)),
        (section("train.json") + section("workload.json"), kway.profile(job, devices="cpu:2", seconds=0.1)),
    ):
        unknown = {name for name in keys(record.to_dict(), free) if f"`{name}`" not in text}
        assert unknown <= {"kind", "schema"}, type(record)


def test_every_command_is_explained():
    text = "\n".join(path.read_text() for path in GUIDE)
    missing = [name for name in commands() if f"kway {name}" not in text]
    assert not missing


@pytest.mark.parametrize("path", GUIDE, ids=lambda path: path.stem)
def test_flags_and_names_in_the_text_exist(path):
    flags = {flag for name in commands() for flag in parser_of(name)._option_string_actions}
    for flag in re.findall(r"(?<![\w-])(--[a-z][a-z_-]+)", prose(path)):
        assert flag in flags or flag in ("--help", "--version"), f"{path.name}: no command has {flag}"
    for name in re.findall(r"`kway\.(\w+)", prose(path)):
        assert name in dir(kway), f"{path.name}: kway has no {name}"


def test_the_guide_names_every_argument_and_event_of_train():
    text = (ROOT / "docs/guide/your-own-model.md").read_text()
    shown = re.search(r"`kway\.train\(job, ([^`]*)\)`", text)
    assert shown
    assert ["job", *re.findall(r"\w+", shown[1])] == list(inspect.signature(kway.train).parameters)
    sources_of = [path for room in ("training", "jobs") for path in (ROOT / "src/kway" / room).glob("*.py")]
    events = {name for path in sources_of for name in re.findall(r'"event": "(\w+)"', path.read_text())}
    sentence = text[text.index("with the events") : text.index("; one that raises stops")]
    assert set(re.findall(r"`(\w+)`", sentence)) - {"log_every"} == events
    said = inspect.getdoc(kway.train)
    assert said is not None
    assert all(f"``{event}``" in said for event in events)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not target.startswith(("http://", "https://")):
            file, _, heading = target.partition("#")
            found = (path.parent / file) if file else path
            assert found.exists(), f"{path.name}: no {target}"
            titles = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE) if heading else []
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in slugs, f"{path.name}: no heading {target}"


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *(path for path in ALL if path not in GUIDE)], ids=lambda path: path.stem
)
def test_files_that_are_named_exist(path):
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|toml|txt))`", prose(path)):
        found = "NNNN" in name or any((root / name).exists() for root in (ROOT, ROOT / "src/kway"))
        assert found, f"{path.name}: no {name}"


def test_shares_that_a_proof_shows_are_those_that_it_would_cut():
    pytest.importorskip("mlxtend")
    checked = 0
    for path in GUIDE:
        for shown in (run for b in blocks(path) for run in re.split(r"^\$ kway ", b.text, flags=re.M)[1:]):
            rows = re.findall(r"^data=(\d+) +\d+ +([\d+]+) ", shown, re.MULTILINE)
            words = shlex.split(shown.partition("\n")[0])
            if not rows or words[0] != "prove":
                continue
            args = parser_of("prove").parse_args(words[1:])
            data = sources.load(args.data).train
            parts = take_apart(data, batch_size=args.batch_size, seed=0, shuffle=True)
            sizes = [int(size) for size, _ in rows]
            shards = args.shards if args.exactness == "bits" else None
            last = draw(parts, args.steps or STEPS, shards or max(sizes))[-1][1]
            for size, (_, said) in zip(sizes, rows, strict=True):
                cuts = [outline(last, 0, 0, rank, size, None, shards).indices for rank in range(size)]
                assert "+".join(str(len(cut)) for cut in cuts) == said, f"{path.name}: {shown}"
                checked += 1
    assert checked >= 6


@pytest.mark.parametrize("place", ["one", "two", "three"])
def test_messages_are_as_they_are_shown(place, capsys, monkeypatch, tmp_path):
    shown = re.findall(
        r"^\$ kway (.+)\n(kway: error: .+)$", (ROOT / "docs/guide/errors.md").read_text(), re.M
    )
    assert len(shown) == 3
    command, message = shown[["one", "two", "three"].index(place)]
    if "no GPU" in message and (
        discover().gpus or "no NVIDIA driver" not in discover().backends["cuda"]["why"]
    ):
        pytest.skip("this machine says something else about its GPUs")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 2
    assert capsys.readouterr().err.strip() == message
    assert not list(tmp_path.iterdir())
