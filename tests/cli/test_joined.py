"""Commands inside ranks that another launcher started: rank 0 prints and writes, once."""

import pytest
from tests.joined import on_two_ranks


def command(*words):
    """Run a command of kway on two ranks; return what each printed."""
    codes, printed = on_two_ranks("-m", "kway", *words)
    assert codes == [0, 0]
    return printed


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands", "leftovers")
def test_training_evaluation_and_prediction_speak_once(tmp_path):
    run = tmp_path / "run"
    first, second = command("train", "mlp", "--epochs", "1", "--steps", "2", "--no-tune", "--out", str(run))
    assert "wrote " in first
    assert second == ""
    first, second = command("evaluate", "mlp", "--weights", str(run))
    assert "loss" in first
    assert second == ""
    out = tmp_path / "predicted"
    first, second = command("predict", "mlp", "--weights", str(run), "--out", str(out))
    assert str(out / "predictions.safetensors") in first
    assert (out / "predictions.safetensors").stat().st_size > 1000
    assert second == ""
