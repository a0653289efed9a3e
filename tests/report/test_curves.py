import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from kway.errors import UsageError
from kway.records import Training
from kway.report.curves import HELD_OUT, TRAIN, draw, layout_text


def training(epochs: list[dict[str, Any]], **changes: Any) -> Training:
    fields: dict[str, Any] = {
        "model": "lenet",
        "strategy": "data",
        "devices": 2,
        "device_set": ["cpu", "cpu"],
        "layout": {"data": 2},
        "exactness": "math",
        "step_kind": "eager",
        "precision": "fp32",
        "batch_size": 64,
        "seed": 0,
        "steps": 10,
        "resumed_from_step": None,
        "predicted_step_s": None,
        "measured_step_s": None,
        "input_wait_s": 0.0,
        "peak_memory_bytes": [1, 1],
        "weights_sha256": "",
        "epochs": epochs,
        "best": None,
        "notices": [],
        "versions": {},
        "started": "",
        "wall_s": 1.0,
    }
    return Training(**(fields | changes))


def epoch(number: int, **changes: Any) -> dict[str, Any]:
    plain = {"epoch": number, "steps": 5, "samples": 300, "train_loss": 2.0 / number, "seconds": 1.0}
    return plain | {"samples_per_s": 300.0, "lr": 0.1, "train_accuracy": 1 - 0.5 / number} | changes


def with_validation(number: int) -> dict[str, Any]:
    return epoch(number, validation_loss=2.2 / number, accuracy=1 - 0.6 / number)


def inked(path: Path, style: dict[str, Any]) -> int:
    """How many pixels have the colour of a series."""
    pixels = imread(path)[..., :3]
    return int((np.abs(pixels - np.array(to_rgb(style["color"]))).max(axis=2) < 0.02).sum())


def test_both_series_are_drawn(tmp_path: Path) -> None:
    path = draw(training([with_validation(n) for n in range(1, 6)]), tmp_path / "curves.png")
    assert path == tmp_path / "curves.png"
    assert inked(path, TRAIN) > 1000
    assert inked(path, HELD_OUT) > 1000


def test_without_validation_only_training_is_drawn(tmp_path: Path) -> None:
    path = draw(training([epoch(n) for n in range(1, 6)]), tmp_path / "curves.png")
    assert inked(path, TRAIN) > 1000
    assert inked(path, HELD_OUT) == 0


def test_the_json_form_gives_the_same_picture(tmp_path: Path) -> None:
    record = training([with_validation(1), with_validation(2)])
    first = draw(record, tmp_path / "a.png")
    second = draw(record.to_dict(), tmp_path / "b.png")
    assert first.read_bytes() == second.read_bytes()


def test_one_epoch_shows_a_mark(tmp_path: Path) -> None:
    assert inked(draw(training([epoch(1)]), tmp_path / "one.png"), TRAIN) > 100


@pytest.mark.parametrize("broken", ["nan", float("nan"), float("inf"), None])
def test_values_that_are_not_finite_leave_a_gap(tmp_path: Path, broken: Any) -> None:
    whole = draw(training([epoch(n) for n in range(1, 8)]), tmp_path / "whole.png")
    holed = draw(
        training([epoch(n, **({"train_loss": broken} if n == 4 else {})) for n in range(1, 8)]),
        tmp_path / "holed.png",
    )
    assert 100 < inked(holed, TRAIN) < inked(whole, TRAIN)


def test_a_run_without_one_finite_value_still_draws(tmp_path: Path) -> None:
    entry = epoch(1, train_loss="nan", train_accuracy="nan")
    assert inked(draw(training([entry]), tmp_path / "nan.png"), TRAIN) == 0


def test_each_metric_gets_a_panel(tmp_path: Path) -> None:
    few = imread(draw(training([epoch(1)]), tmp_path / "few.png"))
    many = imread(draw(training([epoch(1, train_f1=0.5, train_auc=0.5)]), tmp_path / "many.png"))
    assert many.shape[0] > few.shape[0]
    assert many.shape[1] > few.shape[1]


def test_long_numbers_stay_inside_the_picture(tmp_path: Path) -> None:
    epochs = [epoch(n, train_loss=-1.5e-5 * n, train_perplexity=1.5e5 * n, train_auc=3e9 * n) for n in (1, 2)]
    pixels = imread(draw(training(epochs), tmp_path / "long.png"))[..., :3]
    assert pixels.min() < 0.5
    for edge in (pixels[:8], pixels[-8:], pixels[:, :8], pixels[:, -8:]):
        assert edge.min() == 1


def test_no_epoch_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one"):
        draw(training([]), tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*curves.png"):
        draw(training([epoch(1)]), tmp_path / "absent" / "curves.png")


def test_layout_in_words() -> None:
    def words(devices: list[str]) -> str:
        return layout_text(training([], devices=len(devices), device_set=devices))

    assert words(["cpu", "cpu"]) == "data on 2 CPU ranks"
    assert words(["cpu"]) == "data on the CPU"
    assert words(["cuda:1", "cuda:3"]) == "data on cuda:1, cuda:3"
    assert words([f"cuda:{n}" for n in range(8)]) == "data on 8 devices"


def test_drawing_needs_neither_torch_nor_pyplot(tmp_path: Path) -> None:
    file = training([epoch(1)]).save(tmp_path)
    code = (
        "import sys; from pathlib import Path; from kway.records import Training;"
        "from kway.report.curves import draw;"
        f"draw(Training.load(Path({str(file)!r})), Path({str(tmp_path / 'x.png')!r}));"
        "sys.exit(bool({'torch', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert (tmp_path / "x.png").stat().st_size > 1000
