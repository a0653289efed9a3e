"""Precisions: what is cast, what is scaled, which flags are set and given back."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.job import PRECISIONS
from kway.step.precision import cast, precision_of

CPU = torch.device("cpu")
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2


class Seen(nn.Module):
    """Notes the dtypes that pass through it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen = set()

    def forward(self, x):
        y = self.layer(x)
        self.seen |= {(x.dtype, self.layer.weight.dtype, y.dtype)}
        return y


def train(precision, **more):
    model = Seen()
    optimizer = more.pop("optimizer", partial(torch.optim.SGD, lr=0.1))
    job = kway.Job(
        model=model, loss=more.pop("loss", nn.CrossEntropyLoss()), optimizer=optimizer, data=(X, Y),
        batch_size=6, precision=precision, **more,
    )  # fmt: skip
    return kway.train(job, devices="cpu:1", epochs=1), model


def test_every_precision_of_a_job_is_known():
    for name in PRECISIONS:
        assert precision_of(name).name == name


@pytest.mark.parametrize(
    ("precision", "seen"),
    [
        ("fp64", (torch.float64, torch.float64, torch.float64)),
        ("fp32", (torch.float32, torch.float32, torch.float32)),
        ("tf32", (torch.float32, torch.float32, torch.float32)),
        ("bf16", (torch.float32, torch.float32, torch.bfloat16)),
        ("fp16", (torch.float32, torch.float32, torch.float16)),
    ],
)
def test_what_the_model_computes_in(precision, seen):
    run, model = train(precision)
    assert model.seen == {seen}
    assert model.layer.weight.dtype == seen[1]
    assert 0 < run.epochs[0]["train_loss"] < 2


def test_half_precision_stays_near_single():
    losses = {name: train(name, init=start)[0].epochs[0]["train_loss"] for name in ("fp32", "bf16", "fp16")}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.005)
    assert losses["bf16"] != losses["fp32"]


def start(model):
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[0.3, -0.2, 0.9], [0.1, 0.5, -0.4]]))
        model.layer.bias.zero_()


def overflowing(output, target):
    """Gradients of 4 here, times the first scale of 65536, leave the range of float16."""
    return 4.0 * 12 * output.float().sum(1)


def ten_steps(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)


def test_an_overflow_skips_optimizer_and_schedule_together():
    run, model = train("fp16", loss=overflowing, schedule=ten_steps, init=start)
    assert run.record.steps == 2
    assert run.epochs[0]["lr"] == 0.1  # both steps overflow: the schedule has not moved either
    fresh = Seen()
    start(fresh)
    assert torch.equal(model.layer.weight, fresh.layer.weight)


LEFT_OUT = "of {} were left out, since gradients overflowed float16: the weights did not move"


def test_steps_that_overflow_are_counted_once_at_the_end():
    record = train("fp16", loss=overflowing, schedule=ten_steps, init=start)[0].record
    (said,) = [line for line in record.notices if "overflowed" in line]
    assert said.startswith(f"2 {LEFT_OUT.format('2 steps')}, and neither did the schedule;")
    quiet = [train("fp16", init=start), train("fp32", loss=overflowing, init=start)]
    assert not any("overflowed" in line for run, _ in quiet for line in run.record.notices)


def test_a_loop_of_ones_own_tells_of_them_where_it_ends(capfd):
    job = kway.Job(Seen, overflowing, torch.optim.SGD, (X, Y), batch_size=4, precision="fp16")
    with kway.parallel(job, devices="cpu:1") as p:
        for batch in p.batches(0):
            p.step(batch)
        assert "overflowed" not in capfd.readouterr().err
    assert capfd.readouterr().err.count(f"kway: {p.steps} {LEFT_OUT.format('3 steps')};") == 1


def test_flags_are_given_back():
    cudnn = torch.backends.cudnn
    before = torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32
    with precision_of("tf32").flags():
        assert (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32) == (True, True)
    with precision_of("fp32").flags():
        assert (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
    assert (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32) == before


def test_casting_keeps_integers_ties_and_imaginary_parts():
    model = nn.Module()
    model.real, model.wave = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor([1 + 2j]))
    model.tied = model.real
    model.register_buffer("count", torch.tensor(3))
    assert cast(model, torch.float64) is model
    assert (model.real.dtype, model.wave.dtype, model.count.dtype) == (
        torch.float64,
        torch.complex128,
        torch.int64,
    )
    assert model.tied is model.real
    assert model.wave.item() == 1 + 2j
    assert cast(nn.Linear(1, 1), None).weight.dtype == torch.float32
