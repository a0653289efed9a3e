"""A run does not go on from the checkpoint of another job, and says all at once what differs."""

from functools import partial

import pytest
import torch
from tests.jobs import resumable
from tests.jobs.resumable import Net
from torch import nn

import kway
from kway.errors import UsageError


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.first.weight.requires_grad_(False)


class Wide(Net):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 4)


def job(**more):
    draw = torch.Generator().manual_seed(5)
    x, y = torch.rand(48, 12, generator=draw), torch.randint(3, (48,), generator=draw)
    steps = partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5)
    return resumable.job(x, y, **{"batch_size": 24, "ema": 0.9, "schedule": steps, **more})


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    out = tmp_path_factory.mktemp("begun") / "run"
    kway.train(job(), devices="cpu:1", out=out, steps=1, checkpoint_every="1steps")
    return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 12}, ["batch_size 24, now 12"]),
        ({"seed": 3, "ema": None}, ["seed 0, now 3", "ema 0.9, now none"]),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, ["label_smoothing=0.1"]),
        ({"optimizer": partial(torch.optim.Adam, lr=0.02)}, ["lr 0.01, now 0.02"]),
        ({"optimizer": partial(torch.optim.SGD, lr=0.01)}, ["another optimizer: Adam, now SGD: its"]),
        ({"model": partial(nn.Linear, 12, 3)}, ["missing"]),
        ({"precision": "fp64"}, ["precision fp32, now fp64"]),
        ({"model": Frozen}, ["newly frozen: first.weight"]),
        # All of it at once.
        (
            {"seed": 3, "optimizer": partial(torch.optim.SGD, lr=0.02)},
            ["another job: seed 0, now 3; optimizer: Adam, now SGD; lr 0.01, now 0.02: going"],
        ),
        (
            {"model": partial(nn.Linear, 12, 3), "optimizer": partial(torch.optim.Adam, lr=0.02)},
            [
                "another job: weights: missing bias, weight; not in the model first.",
                "; optimizer: lr 0.01, now 0.02: going",
            ],
        ),
        (
            {"seed": 3, "model": Wide},
            ["seed 0, now 3; weights: 'last.weight' has shape (3, 16) (the model has (4, 16)): going"],
        ),
        ({"seed": 3, "optimizer": lambda named: 1 / 0}, ["another job: seed 0, now 3: going"]),
    ],
)
def test_another_job_is_refused_with_what_differs(begun, tmp_path, change, words):
    with pytest.raises(UsageError) as caught:
        kway.train(job(**change), devices="cpu:1", out=tmp_path / "more", resume=begun, steps=2)
    for word in words:
        assert word in str(caught.value)
    # Weights that do not fit this model are no beginning for it either, which is said.
    text = str(caught.value)
    fits = "model" not in change or change["model"] is Frozen
    assert ("--init" in text) == fits
    said = "go on with the job that wrote it; its weights do not fit this model, also not to begin a new run from"
    assert text.endswith(said) == (not fits and "another job" in text)
    assert not (tmp_path / "more").exists()


def form_of(run):
    group = run.record.job["optimizer"]["groups"][0]
    return {name for name in ("foreach", "fused") if group[name]}


def test_how_an_optimizer_goes_over_its_parameters_may_change(tmp_path):
    def train(name, **more):
        out = tmp_path / name
        return kway.train(job(), devices="cpu:1", out=out, checkpoint_every="1steps", **more)

    assert form_of(train("first", steps=1, settings={"optimizer": "foreach"})) == {"foreach"}
    more = train("more", steps=2, settings={"optimizer": "fused"}, resume=tmp_path / "first")
    assert (more.record.resumed_from_step, form_of(more)) == (1, {"fused"})
    # It is nobody's concern either where something else differs.
    with pytest.raises(UsageError, match="another job: seed 0, now 3: going"):
        kway.train(job(seed=3), devices="cpu:1", resume=tmp_path / "more", steps=3)


def test_it_may_not_at_level_bits(tmp_path):
    def train(**more):
        fused = partial(torch.optim.Adam, lr=0.01, **more)
        return kway.train(
            job(optimizer=fused), devices="cpu:1", exactness="bits", steps=1, checkpoint_every="1steps",
            out=tmp_path / str(len(more)), resume=tmp_path / "0" if more else False,
        )  # fmt: skip

    train()
    with pytest.raises(UsageError, match="another optimizer: fused None, now True"):
        train(fused=True)
