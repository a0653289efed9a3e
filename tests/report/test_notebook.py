"""What a cell of a notebook shows of a run: one output, updated, and a few lines however long the run was."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kway.report import notebook
from kway.report.notebook import Cell, in_notebook
from kway.report.progress import Progress
from kway.report.shown import Shown

START = {"epochs": 40, "steps_per_epoch": 40, "samples": 4000, "devices": 2, "strategy": "data"}


class Output:
    """The output of a cell: ``texts`` that it has had, ``made`` how many outputs there are."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.made = 0

    def __call__(self, text: str) -> Any:
        self.made += 1
        self.texts.append(text)
        return self.texts.append


def test_one_output_is_updated_twice_a_second_and_complete_at_the_end() -> None:
    out, now = Output(), [100.0]
    cell = Cell(out, lambda: now[0])
    for number in range(100):
        cell.write(f"\rstep {number}  ")
        cell.flush()
        now[0] += 0.0625
    assert out.made == 1
    assert out.texts == [f"step {number}" for number in range(0, 100, 8)]
    cell.write("\r          \rdone\n")
    cell.settle()
    cell.settle()
    assert out.texts[-2:] == ["step 96", "done"]


def test_a_long_run_leaves_its_beginning_and_its_end() -> None:
    cell = Cell(Output())
    for number in range(1000):
        cell.write(f"line {number}\n")
    cell.write("\rlast")
    lines = cell.text.split("\n")
    assert lines[:4] == ["line 0", "line 1", "line 2", "... (985 lines left out here)"]
    assert lines[4:] == [*(f"line {number}" for number in range(988, 1000)), "last"]


def test_few_lines_are_all_there() -> None:
    cell = Cell(Output())
    cell.write("".join(f"line {number}\n" for number in range(15)))
    assert cell.text.split("\n") == [f"line {number}" for number in range(15)]


def test_progress_is_redrawn_in_a_cell() -> None:
    cell: Any = Cell(Output())
    show = Progress(cell, live=True, width=lambda: 100)
    show({"event": "start", **START})
    show(
        {"event": "step", "epoch": 1, "step": 7, "steps": 40, "loss": 123456.0, "samples": 7, "seconds": 1.0}
    )
    assert cell.text.endswith("loss 123456.0000")
    show({"event": "epoch", "epoch": 1, "train_loss": 0.5})
    assert cell.text.split("\n")[1:] == ["epoch  1/40  loss 0.5000"]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]


def test_a_kernel_is_told_from_a_terminal_and_a_script(monkeypatch: pytest.MonkeyPatch, kernel: None) -> None:
    assert in_notebook()
    for shell in (None, SimpleNamespace()):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_shown_goes_to_the_cell_in_a_notebook(monkeypatch: pytest.MonkeyPatch, kernel: None) -> None:
    out = Output()
    monkeypatch.setattr(notebook, "_displayed", out)
    show = Shown(lambda stream: stream.isatty())
    show("start", START)
    show("epoch", {"epoch": 1, "train_loss": 0.5})
    show.close()
    assert out.made == 1
    assert out.texts[-1].endswith("\nepoch  1/40  loss 0.5000")


def test_shown_goes_to_standard_output_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    show = Shown(lambda stream: stream.isatty())
    show.close()
    show("start", START)
    show("epoch", {"epoch": 1, "train_loss": 0.5})
    show.close()
    assert capsys.readouterr().out.splitlines() == [
        "40 epochs, 40 steps over 4,000 samples each, data on 2 devices",
        "epoch  1/40  loss 0.5000",
    ]
