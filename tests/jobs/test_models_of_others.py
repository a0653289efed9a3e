"""Models that nobody here wrote, in a user's file each: profiled, planned, trained and proved as they are."""

from pathlib import Path

import pytest
import torch
from tests.planning.machine import measurements

import kway
from kway.cli._objects import load_object

pytest.importorskip("transformers", reason="transformers is not installed")

FILES = Path(__file__).parents[1] / "users"


@pytest.mark.parametrize("name", ["resnet", "vit", "gpt2"])
def test_a_model_of_others_is_profiled_planned_trained_and_proved(name, ranks, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = load_object("MODEL", f"{FILES / name}.py:job")
    assert type(job.model()).__module__.startswith("transformers.")

    workload = kway.profile(job, devices="cpu:2", seconds=1.0)
    assert workload.parameters["count"] == sum(p.numel() for p in job.model().parameters())
    planned = kway.plan(
        job, devices="1,2", strategy="single,data", workload=workload, measurements=measurements()
    )
    steps = {row["strategy"]: row["step_s"] for row in planned.candidates}
    assert set(steps) == {"single", "data=2"}
    assert all(seconds > 0 for seconds in steps.values())

    runs = [kway.train(job, devices=f"cpu:{k}", epochs=1, ranks=ranks) for k in (1, 2)]
    losses = [run.record.epochs[0]["train_loss"] for run in runs]
    # Dropout draws as on one device: the loss of one epoch agrees but for rounding.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    weights = [dict(run.model.named_parameters()) for run in runs]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-5, msg=key)

    proof = kway.prove(job, devices="1,2", ranks=ranks)
    assert proof.verdict == "pass", str(proof)
