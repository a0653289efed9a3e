"""Each script of examples/ that stands beside a version by hand: short, and both come to the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    "one_device", "data_parallel", "all_reduce", "ddp_launcher", "ddp_spawn", "cpu_gpu", "overlap", "process_pool",
]  # fmt: skip
# Those that a test of their own runs.
OTHERS = ["fashion_mnist"]
TRAIN = [name for name in SCRIPTS if name not in ("cpu_gpu", "overlap", "process_pool", "ddp_launcher")]
# Both versions run the same kernels; of the sum over ranks and samples each has an order of its own. Five float32
# digits of weights below 1, after 24 steps.
ROUNDING = 1e-5


def ran(words, tmp_path):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=100,
        # Measurements of other tests are not to be found, nor these by others.
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(line):
    return [float(text) for text in re.findall(r"\d+\.\d+", line)]


def row(said, name):
    return numbers(re.search(rf"^{name} .*$", said, re.M)[0])


def agrees(said):
    """Assert that the seconds of both stand beside each other, for each epoch, and that the weights are the same."""
    assert len(row(said, "by hand")) == len(row(said, "kway")) == 2
    assert all(value > 0 for name in ("by hand", "kway") for value in row(said, name))
    assert float(re.search(r"^largest difference of a weight: (\S+)$", said, re.M)[1]) < ROUNDING


def test_every_script_is_run_listed_and_short():
    there = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert there == sorted(SCRIPTS + OTHERS)
    for name in SCRIPTS:
        lines = (ROOT / f"examples/{name}.py").read_text().splitlines()
        assert len(lines) < 80, name
    for name in [
        *(f"{name}.py" for name in there),
        *(path.name for path in (ROOT / "examples").glob("*.ipynb")),
    ]:
        assert f"`{name}`" in (ROOT / "examples/README.md").read_text()
        assert f"examples/{name}" in (ROOT / "Makefile").read_text()


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize("name", TRAIN)
def test_what_is_trained_by_hand_has_the_weights_of_kway(name, tmp_path):
    agrees(ran([f"examples/{name}.py"], tmp_path))


@pytest.mark.starts
def test_ranks_of_a_launcher_train_both_ways(tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = ran([*words, "examples/ddp_launcher.py"], tmp_path)
    assert "DDP by launcher, 2 ranks" in said
    agrees(said)


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands")
def test_the_launcher_s_script_says_how_it_is_started():
    done = subprocess.run(
        [sys.executable, "examples/ddp_launcher.py"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "torchrun --nproc-per-node 2 examples/ddp_launcher.py" in done.stderr


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands")
def test_a_pool_by_hand_gives_the_losses_of_map(tmp_path):
    said = ran(["examples/process_pool.py"], tmp_path)
    hand, found = row(said, "by hand"), row(said, "kway")
    assert len(hand) == 5
    assert hand[:-1] == pytest.approx(found[:-1], abs=1e-5)
    assert len({*found[:-1]}) == 4


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize(
    ("name", "rows"), [("cpu_gpu", [" +4", " +16", " +64"]), ("overlap", ["one after the other", "at once"])]
)
def test_times_by_hand_stand_beside_those_of_measure(name, rows, tmp_path):
    said = ran([f"examples/{name}.py"], tmp_path)
    for each in rows:
        by_hand, measured = row(said, each)
        # Of the same order: on cores that others use at times, nothing closer can be promised.
        assert 0.02 < by_hand / measured < 50
