"""A run that ended at a later step than its newest checkpoint, and another that goes on from there."""

import shutil

from tests.jobs.test_resume import job

import kway


def test_a_run_that_went_further_than_its_newest_checkpoint_is_said_to(tmp_path):
    first = kway.train(
        job(), devices="cpu:1", steps=3, epochs=9, checkpoint_every="2steps", out=tmp_path / "a", tune=False
    )
    newest = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "a/checkpoints").glob("step-*"))
    for path in (tmp_path / "a/checkpoints").glob("step-*"):
        if path.name != "step-2":
            shutil.rmtree(path)
    assert (first.record.steps, newest) in [(3, 2), (3, 3)]
    said = []
    kway.train(
        job(), devices="cpu:1", steps=4, epochs=9, resume=tmp_path / "a", out=tmp_path / "b", tune=False,
        callbacks=[lambda event, record: said.append(record.get("text", ""))],
    )  # fmt: skip
    assert any("went on to step 3; its newest checkpoint is of step 2" in text for text in said), said
