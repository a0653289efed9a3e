"""Models that nobody here wrote, in a user's file each: profiled, planned, trained and proved as they are."""

from dataclasses import replace
from pathlib import Path

import pytest
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

    hashes = {
        kway.train(job, devices=f"cpu:{k}", exactness="bits", epochs=1, ranks=ranks).record.weights_sha256
        for k in (1, 2)
    }
    assert len(hashes) == 1

    proof = kway.prove(job, devices="1,2", ranks=ranks)
    assert proof.verdict == "pass", str(proof)


def test_blocks_of_others_that_cannot_be_computed_again_are_one_clear_error():
    job = load_object("MODEL", f"{FILES / 'gpt2.py'}:job")
    with pytest.raises(
        kway.RefusedError, match="GPT2LMHeadModel whose blocks cannot be computed again"
    ) as caught:
        kway.train(job, devices="cpu:1", steps=1, settings={"recompute": True})
    assert "use_cache=False" in caught.value.do

    def without():
        model = job.model()
        model.config.use_cache = False
        return model

    kway.train(replace(job, model=without), devices="cpu:1", steps=1, settings={"recompute": True})
