"""What acts on gradients inside of backward sees them as large as on one device, however a batch is cut."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kway

G = torch.Generator().manual_seed(0)
X, Y = (
    torch.randn(26, 5, generator=G, dtype=torch.float64),
    torch.randn(26, 3, generator=G, dtype=torch.float64),
)
SGD = partial(torch.optim.SGD, lr=0.05)
CUTS = {
    "micro-batches": {"devices": "cpu:1"},
    "threads": {"devices": "cpu:2", "strategy": "threads"},
    "data=2": {"devices": "cpu:2", "strategy": "data"},
    "shards": {"devices": "cpu:1", "exactness": "bits"},
    "shards on 2": {"devices": "cpu:2", "strategy": "data", "exactness": "bits"},
}


def limited():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0].clamp(-0.005, 0.005),))
    return model


def weighed(output, target):
    """Return a sum and its weight: two of each sample."""
    return (output - target).square().sum(), torch.tensor(2.0 * len(output))


def own(output, target):
    return (output - target).square()


LOSSES = {
    "mean": (nn.MSELoss(), F.mse_loss),
    "sum": (nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum")),
    "own": (own, F.mse_loss),
    "weighed": (weighed, lambda output, target: (output - target).square().sum() / (2 * len(output))),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_hook_that_limits_gradients_of_a_layer_acts_as_on_one_device(ranks, cut, loss):
    given, right = LOSSES[loss]
    model = limited()
    optimizer = SGD(model.parameters())
    for _ in range(2):
        for first in (0, 13):
            optimizer.zero_grad()
            right(model(X[first : first + 13]), Y[first : first + 13]).backward()
            optimizer.step()
    job = kway.Job(
        model=limited,
        loss=given,
        optimizer=SGD,
        data=(X, Y),
        batch_size=13,
        shuffle=False,
        precision="fp64",
        micro_batch=4 if cut == "micro-batches" else None,
    )
    where = CUTS[cut] | ({"ranks": ranks} if CUTS[cut].get("strategy") == "data" else {})
    trained = kway.train(job, epochs=2, echo=False, **where).model
    torch.testing.assert_close(trained[0].weight, model[0].weight, rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [1, 2])
def test_half_precision_skips_the_steps_that_torch_skips(ranks, size):
    """Of 1,000 numbers a sample: gradients of their sum would leave the range of float16."""
    x, y = torch.randn(64, 8, generator=G), torch.randn(64, 1000, generator=G)

    def made():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1000))

    def falling(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)

    model, scaler = made(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = falling(optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() == before:
            schedule.step()
    job = kway.Job(
        model=made,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(x, y),
        batch_size=64,
        precision="fp16",
        schedule=falling,
    )
    run = kway.train(job, devices=f"cpu:{size}", strategy="data", epochs=6, ranks=ranks, echo=False)
    assert run.epochs[-1]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
    assert run.epochs[-1]["train_loss"] == pytest.approx(loss.item(), rel=1e-2)


def test_a_run_that_goes_on_divides_by_what_it_divided_by(tmp_path):
    """Samples of other lengths: the first batch of each start would say another weight of a sample."""

    def lengths(output, target):
        # A sum over as many numbers as the target says.
        kept = torch.arange(3)[None] < target[:, :1].abs().mul(2).ceil().clamp(max=3)
        return ((output - target).square() * kept).sum(), kept.sum()

    job = kway.Job(
        model=limited,
        loss=lengths,
        optimizer=SGD,
        data=(X, Y),
        batch_size=13,
        micro_batch=4,
        precision="fp32",
    )
    whole = kway.train(job, devices="cpu:1", epochs=4, echo=False)
    out = tmp_path / "run"
    kway.train(job, devices="cpu:1", epochs=2, out=out, checkpoint_every="1epochs", echo=False)
    after = kway.train(job, devices="cpu:1", epochs=4, resume=out, echo=False)
    assert after.record.weights_sha256 == whole.record.weights_sha256


def agreed(context):
    """What a sample weighs, where all labels of the first rank's share are ignored."""
    labels = torch.tensor([[-100] * 3, [-100] * 3, [0, 1, 1], [1, 0, 0]])
    job = kway.Job(
        model=partial(nn.Conv1d, 2, 2, 1),
        loss=nn.CrossEntropyLoss(),
        optimizer=SGD,
        data=(torch.ones(4, 2, 3), labels),
        batch_size=4,
        shuffle=False,
    )
    with kway.parallel(job, devices="auto", strategy="data") as session:
        for batch in session.batches(0):
            session.step(batch)
        return session.engine._step.per_sample


def test_a_share_that_weighs_nothing_is_not_asked(ranks):
    assert ranks.run(agreed, size=2) == [3.0, 3.0]


def test_a_first_share_of_little_weight_lets_no_gradient_overflow():
    weights = torch.ones(16, dtype=torch.float64)
    weights[:4] = 1e-39

    def light(output, target):
        values, weight = target[:, :3].float(), target[:, 3].float()
        return ((output - values).square().mean(1) * weight).sum(), weight.sum()

    data = X[:16].float(), torch.cat([Y[:16], weights[:, None]], 1)
    job = kway.Job(
        model=partial(nn.Linear, 5, 3), loss=light, optimizer=SGD, data=data, batch_size=16, shuffle=False
    )
    right = kway.train(job, devices="cpu:1", epochs=3, echo=False).model
    for more, options in (({"micro_batch": 4}, {}), ({}, {"exactness": "bits"})):
        run = kway.train(replace(job, **more), devices="cpu:1", epochs=3, echo=False, **options)
        torch.testing.assert_close(run.model.weight, right.weight, rtol=1e-5, atol=1e-6)
