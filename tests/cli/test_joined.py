"""Commands inside ranks that another launcher started: rank 0 prints and writes, once."""

import os
import subprocess
import sys

import pytest

from kway.launch.address import reserved_port


def on_two_ranks(*words):
    """Run a command on two ranks that are started by hand; return what each printed."""
    with reserved_port() as port:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "kway", *words],
                env={**os.environ, **meeting, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        printed = [process.communicate(timeout=90)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return printed


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands", "leftovers")
def test_training_evaluation_and_prediction_speak_once(tmp_path):
    run = tmp_path / "run"
    first, second = on_two_ranks(
        "train", "mlp", "--epochs", "1", "--steps", "2", "--no-tune", "--out", str(run)
    )
    assert "wrote " in first
    assert second == ""
    first, second = on_two_ranks("evaluate", "mlp", "--weights", str(run))
    assert "loss" in first
    assert second == ""
    out = tmp_path / "predicted"
    first, second = on_two_ranks("predict", "mlp", "--weights", str(run), "--out", str(out))
    assert str(out / "predictions.safetensors") in first
    assert (out / "predictions.safetensors").stat().st_size > 1000
    assert second == ""
