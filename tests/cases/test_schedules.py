"""A schedule advances once for each optimizer step that was taken, whatever it took to compute it."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

LEVELS = [("math", 1), ("math", 2), ("math", 3), ("loose", 2), ("bits", 1), ("bits", 2), ("bits", 4)]


class One(nn.Module):
    def __init__(self, start=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x):
        return self.w * x


def own(output, _):
    return output


def tenths(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10))


def job_of(model, x, **more):
    more = {"optimizer": partial(torch.optim.SGD, lr=1.0), "schedule": tenths, "shuffle": False, **more}
    return kway.Job(model=model, loss=more.pop("loss", own), data=(x, x), **more)


@pytest.mark.parametrize("micro_batch", [1, 2, None])
@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_w27_once_a_step_with_accumulation_at_every_level(trained, level, size, micro_batch):
    if level == "bits" and micro_batch is not None:
        micro_batch = None
    # The last of four batches is short, and leaves ranks without a sample.
    x = torch.ones(13, dtype=torch.float64)
    run = trained(
        job_of(One, x, batch_size=4, micro_batch=micro_batch, precision="fp64"), size, exactness=level, shards=4,
        epochs=2,
    )  # fmt: skip
    assert [row["lr"] for row in run.epochs] == pytest.approx([0.6, 0.2], abs=1e-12)
    taken = sum(1 - k / 10 for k in range(8))
    assert run.model.w.item() == pytest.approx(1 - taken, rel=1e-12)


class Half(nn.Module):
    """A product in float16, as autocast computes it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, x):
        return self.layer(x)


def steep(output, _):
    """A gradient of 6 a sample: over 4 samples and times the first scale of 65536 it leaves float16, and
    times the second it does not.
    """
    return 6 * output.float()


@pytest.mark.parametrize("micro_batch", [1, None])
@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_w27_a_step_that_overflowed_moves_neither_schedule_nor_average(trained, level, size, micro_batch):
    x = torch.full((16, 1), 2.0**-6)
    run = trained(
        job_of(
            Half, x, loss=steep, batch_size=4, precision="fp16", ema=0.5,
            micro_batch=None if level == "bits" else micro_batch,
        ),
        size, exactness=level, shards=4,
    )  # fmt: skip
    gradient = 6 * 2.0**-6
    weights, average = [0.5], 0.5
    for rate in (1.0, 0.9, 0.8):  # the first of four steps was none
        weights.append(weights[-1] - rate * gradient)
        average = 0.5 * average + 0.5 * weights[-1]
    assert run.record.steps == 4
    assert run.epochs[0]["lr"] == pytest.approx(0.7, abs=1e-12)
    assert run.model.layer.weight.item() == pytest.approx(weights[-1], rel=1e-5)
    assert run.ema["layer.weight"].item() == pytest.approx(average, rel=1e-5)


def always_too_steep(output, _):
    return 1e6 * output.float()


@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_w27_nothing_moves_while_every_step_overflows(trained, level, size):
    x = torch.full((8, 1), 2.0**-6)
    job = job_of(Half, x, loss=always_too_steep, batch_size=4, precision="fp16", ema=0.5)
    run = trained(job, size, exactness=level, shards=4)
    assert run.epochs[0]["lr"] == 1.0
    assert run.model.layer.weight.item() == 0.5
    assert run.ema["layer.weight"].item() == 0.5


class Chosen(Half):
    """Constant where a share holds no sample above zero."""

    def forward(self, x):
        return self.layer(x) if bool((x > 0).any()) else torch.zeros_like(x)


def flat(output, _):
    return output.float()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_w27_a_constant_loss_on_some_or_all_ranks_is_a_step(trained, level, size, precision):
    # Nothing depends on the weight in the first batch; in the second it does on one of its four samples.
    x = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0]).unsqueeze(1)
    job = job_of(
        Chosen, x, loss=flat, batch_size=4, precision=precision, micro_batch=1 if level != "bits" else None
    )
    run = trained(job, size, exactness=level, shards=4)
    assert run.epochs[0]["lr"] == pytest.approx(0.8, abs=1e-12)
    assert run.model.layer.weight.item() == pytest.approx(0.5 - 0.9 * 0.25, rel=1e-5)


def half_a_square(model):
    return 0.5 * model.layer.weight.square().sum()


@pytest.mark.parametrize("size", [1, 2])
def test_w27_a_penalty_alone_moves_what_a_constant_loss_leaves(trained, size):
    x = -torch.ones(4, 1)
    job = job_of(Chosen, x, loss=flat, batch_size=2, precision="fp16", penalty=half_a_square)
    run = trained(job, size)
    assert run.model.layer.weight.item() == pytest.approx(0.5 * (1 - 1.0) * (1 - 0.9), abs=1e-7)
    assert run.epochs[0]["lr"] == pytest.approx(0.8, abs=1e-12)
