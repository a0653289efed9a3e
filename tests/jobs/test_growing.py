"""A batch that grows with the devices: what is said of the learning rate, and what scaling it does."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.jobs.resumable import job as resumable
from torch import nn
from torch.utils.data import IterableDataset

import kway
from kway.errors import UsageError

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(96, 12, generator=G), torch.arange(96) % 3
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
QUIET = {"step_kind": "eager", "tune": False, "echo": False}


def job_of(**more):
    given = {
        "model": partial(nn.Linear, 12, 3),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": SGD,
        "data": (X, Y),
    }
    return kway.Job(**{**given, "precision": "fp64", **more})


def grown(ranks, job, devices=2, **more):
    """Train with 16 samples a device."""
    return kway.train(
        job,
        devices=f"cpu:{devices}",
        batch_size_per_device=16,
        ranks=ranks.of(2),
        **{"epochs": 4, **QUIET, **more},
    )


def by_hand(job, rate, **more):
    """Train on one device with a global batch of 32 and the learning rate ``rate(step)``."""
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=rate)
    return kway.train(
        replace(job, batch_size=32, schedule=schedule), devices="cpu:1", **{"epochs": 4, **QUIET, **more}
    )


def same(one, other):
    for (name, a), b in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)


def test_by_default_nothing_is_scaled_and_what_would_be_usual_is_said(ranks):
    run = grown(ranks, job_of(batch_size=7))
    assert (run.record.batch_size, run.record.lr_scale) == (32, None)
    (line,) = [text for text in run.record.notices if "learning rate" in text]
    assert line == (
        "the global batch is 2 x 16 = 32, and the learning rate stays 0.1: usual against one device would be "
        "0.2 (linear) and 0.1414 (sqrt), with lr_scale= (--lr-scale)"
    )
    same(run, by_hand(job_of(), lambda step: 1.0))


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", 2**0.5)])
def test_rates_rise_over_the_warm_up_to_the_factor_of_the_rule(ranks, rule, factor):
    run = grown(ranks, job_of(), lr_scale=rule, lr_warmup=2)
    assert run.record.lr_scale == {
        "rule": rule,
        "devices": 2,
        "batch_size_per_device": 16,
        "factor": factor,
        "warmup_steps": 6,
    }
    assert [row["lr"] for row in run.epochs] == [
        pytest.approx(0.1 * (1 + (factor - 1) * step / 6)) for step in (3, 6, 6, 6)
    ]
    (line,) = [text for text in run.record.notices if "learning rate" in text]
    assert line == (
        f"the global batch is 2 x 16 = 32; {rule} scaling makes the learning rate {0.1 * factor:.4g}, after a "
        "warm-up of 6 steps from 0.1"
    )
    same(run, by_hand(job_of(), lambda step: 1 + (factor - 1) * min(step, 6) / 6))


def test_a_schedule_of_the_job_is_scaled_with_it(ranks):
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
    run = grown(ranks, job_of(schedule=schedule), lr_scale="linear", lr_warmup="4steps")
    same(run, by_hand(job_of(), lambda step: 0.8**step * (1 + min(step, 4) / 4)))
    assert run.record.job["schedule"] == "ExponentialLR(gamma=0.8)"


@pytest.mark.parametrize(
    ("more", "steps"),
    [({}, 2), ({"steps": 7}, 1), ({"lr_warmup": 0}, 0), ({"lr_warmup": "5steps"}, 5), ({"lr_warmup": 2}, 6)],
)
def test_the_warm_up_is_a_tenth_of_a_short_run_unless_it_is_named(ranks, more, steps):
    run = grown(ranks, job_of(), lr_scale="linear", **{"epochs": 6, **more})
    assert run.record.lr_scale["warmup_steps"] == steps


def test_on_one_device_there_is_nothing_to_scale(ranks):
    plain = grown(ranks, job_of(), devices=1)
    run = grown(ranks, job_of(), devices=1, lr_scale="linear")
    assert run.record.weights_sha256 == plain.record.weights_sha256
    assert run.record.lr_scale["factor"] == 1.0
    assert not [text for text in [*run.record.notices, *plain.record.notices] if "learning rate" in text]


def test_a_run_goes_on_with_the_warm_up_that_it_began_with(ranks, tmp_path):
    job = resumable(
        X, Y, batch_size=None, schedule=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    )

    def part(out, **more):
        return grown(
            ranks, job, out=tmp_path / out, lr_scale="linear", **{"checkpoint_every": "4steps", **more}
        )

    whole = part("whole", epochs=12, lr_warmup="6steps")
    part("run", epochs=12, steps=4, lr_warmup="6steps")
    again = part("again", epochs=12, resume=tmp_path / "run")
    assert again.record.resumed_from_step == 4
    assert again.record.weights_sha256 == whole.record.weights_sha256
    assert again.record.lr_scale == whole.record.lr_scale
    assert json.loads((tmp_path / "again/train.json").read_text())["lr_scale"]["warmup_steps"] == 6
    with pytest.raises(UsageError, match="warm-up of 9 steps for a run that began with one of 6"):
        part("other", epochs=12, lr_warmup="9steps", resume=tmp_path / "run")
    with pytest.raises(UsageError, match=r"lr_scale linear x 2, now sqrt x 1\.41421"):
        grown(ranks, job, epochs=12, lr_scale="sqrt", resume=tmp_path / "run")
    with pytest.raises(UsageError, match="lr_scale linear x 2, now none"):
        grown(ranks, job, epochs=12, resume=tmp_path / "run")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def test_a_stream_of_unknown_length_is_warmed_up_by_steps(ranks):
    job = job_of(data=Stream(), workers=0)
    for warmup in (None, 1):
        with pytest.raises(UsageError, match=r"does not say how long it is.*200steps"):
            grown(ranks, job, lr_scale="linear", lr_warmup=warmup)
    run = grown(ranks, job, lr_scale="linear", lr_warmup="3steps", epochs=1)
    assert run.epochs[0]["lr"] == pytest.approx(0.2)
    assert grown(ranks, job, lr_scale="linear", steps=5).record.lr_scale["warmup_steps"] == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"batch_size_per_device": 0}, "batch_size_per_device=0: it must be a whole number of at least 1"),
        ({"batch_size_per_device": True}, "batch_size_per_device=True"),
        (
            {"lr_scale": "linear"},
            "lr_scale='linear' without batch_size_per_device: the global batch is the same",
        ),
        (
            {"batch_size_per_device": 4, "lr_scale": "cubic"},
            "unknown lr_scale 'cubic': known are linear, sqrt",
        ),
        ({"batch_size_per_device": 4, "lr_warmup": 3}, "lr_warmup=3 without lr_scale"),
        (
            {"batch_size_per_device": 4, "lr_scale": "sqrt", "lr_warmup": "soon"},
            "lr_warmup='soon'.*0 for none",
        ),
        ({"batch_size_per_device": 4, "lr_scale": "sqrt", "lr_warmup": -1}, "lr_warmup=-1"),
        ({"batch_size_per_device": 4, "strategy": "auto"}, "the number of devices is what a plan chooses"),
        ({"batch_size_per_device": 4, "plan": "plan.json"}, "the number of devices is what a plan chooses"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, more, text):
    with pytest.raises(UsageError, match=text):
        kway.train(job_of(), devices="cpu:2", out=tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_a_batch_of_the_jobs_own_that_does_not_count_is_said(ranks):
    said = []

    def note(event, record):
        said.extend([record["text"]] if event == "notice" else [])

    run = grown(ranks, job_of(batch_size=10), epochs=1, callbacks=[note])
    assert "batch_size_per_device=16 counts, and not the job's own batch size of 10" in said
    assert run.record.batch_size == 32
    said.clear()
    grown(ranks, job_of(batch_size=32), epochs=1, callbacks=[note])
    assert "counts, and not" not in str(said)
