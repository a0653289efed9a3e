"""The reference is the loop that anybody would write."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.proving.quiet import without_dropout
from kway.proving.reference import Reference, largest

CPU = torch.device("cpu")
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, -100])


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def decay(model):
    return 0.1 * model[0].weight.square().sum()


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def job_of(**more):
    loss = more.pop("loss", nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return kway.Job(model=net, loss=loss, optimizer=optimizer, data=(X, Y), precision="fp64", **more)


@pytest.mark.parametrize(
    "more", [{}, {"penalty": decay}, {"clip": 0.1}, {"clip": ("value", 0.01)}, {"schedule": halving}]
)
def test_it_is_a_five_line_loop(more):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    snapshots = Reference(job_of(**more), net(), CPU).steps(iter([[(X, Y)], [(X[:4], Y[:4])], [(X, Y)]]))
    for (x, y), snapshot in zip([(X, Y), (X[:4], Y[:4]), (X, Y)], snapshots, strict=True):
        for name, value in model.state_dict().items():
            assert torch.equal(snapshot.before[f"model/{name}"], value)
        loss = nn.functional.cross_entropy(model(x), y, weight=weight)
        loss = loss + decay(model) if "penalty" in more else loss
        optimizer.zero_grad()
        loss.backward()
        if more.get("clip") == 0.1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif "clip" in more:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        if "schedule" in more:
            optimizer.param_groups[0]["lr"] /= 2
        assert torch.equal(snapshot.after["loss"], loss.detach())
        for name, parameter in model.named_parameters():
            assert torch.equal(snapshot.after[f"gradient/{name}"], parameter.grad)
            momentum = optimizer.state[parameter]["momentum_buffer"]
            assert torch.equal(snapshot.after[f"optimizer/{name}/momentum_buffer"], momentum)
        for name, value in model.state_dict().items():
            assert torch.equal(snapshot.after[f"model/{name}"], value)


def test_other_orders_measure_noise_and_leave_no_trace():
    order = torch.tensor([5, 3, 4, 0, 2, 1])
    batches = [[(X, Y)], [(X, Y)], [(X, Y)]]
    noisy = [[*own, (X[order], Y[order]), (X.flip(0), Y.flip(0))] for own in batches]
    plain = list(Reference(job_of(), net(), CPU).steps(iter(batches)))
    measured = list(Reference(job_of(), net(), CPU).steps(iter(noisy)))
    for without, with_noise in zip(plain, measured, strict=True):
        assert set(without.noise.values()) == {0.0}
        assert 0 < max(with_noise.noise.values()) < 1e-12
        assert all(torch.equal(without.after[name], value) for name, value in with_noise.after.items())


def test_so_do_those_of_a_scripted_model():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double())
    (snapshot,) = Reference(job_of(), scripted, CPU).steps(iter([[(X, Y), (X.flip(0), Y.flip(0))]]))
    assert 0 <= max(snapshot.noise.values()) < 1e-12


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (lambda output, _: output.square(), lambda output: output.square().mean()),
        (lambda output, _: (output.sum(), 7.0), lambda output: output.sum() / 7),
        (lambda output, _: output.square().mean(), lambda output: output.square().mean()),
    ],
)
def test_losses_of_the_user_s_own_are_what_one_device_would_make_of_them(loss, value):
    (snapshot,) = Reference(job_of(loss=loss), net(), CPU).steps(iter([[(X, Y)]]))
    assert float(snapshot.after["loss"]) == pytest.approx(float(value(net()(X)).detach()), rel=1e-15)


def test_a_schedule_that_waits_for_a_metric_stands_still():
    job = job_of(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert len(list(Reference(job, net(), CPU).steps(iter([[(X, Y)], [(X, Y)]])))) == 2


def test_largest_difference():
    assert largest(torch.zeros(0), torch.zeros(0)) == 0.0
    assert largest(torch.tensor([1, 5]), torch.tensor([4, 5])) == 3.0
    assert largest(torch.tensor([True]), torch.tensor([False])) == 1.0
    nan = float("nan")
    assert largest(torch.tensor([nan, 2.0]), torch.tensor([nan, 1.0])) == 1.0
    assert largest(torch.tensor([nan]), torch.tensor([1.0])) != largest(
        torch.tensor([1.0]), torch.tensor([1.0])
    )


def test_dropout_is_off_inside_and_back_afterwards():
    model = nn.Sequential(nn.Dropout(0.3), nn.LSTM(2, 2, num_layers=2, dropout=0.4), nn.AlphaDropout(0.1))
    x = torch.ones(100)
    with without_dropout(model) as names:
        assert torch.equal(model[0](x), x)
        assert torch.equal(model[2](x), x)
        assert torch.equal(nn.functional.dropout(x, 0.5), x)
        assert model[1].dropout == 0.0
        assert names == ["0", "1", "2"]
    assert (model[0].p, model[1].dropout, model[2].p) == (0.3, 0.4, 0.1)
    assert not torch.equal(nn.functional.dropout(x, 0.5), x)


def test_attention_drops_nothing_out_inside_whoever_gives_it_the_rate():
    rows = torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    attention = partial(nn.functional.scaled_dot_product_attention, rows, rows, rows)
    right = attention(is_causal=True)
    with without_dropout(nn.Identity()):
        held = nn.functional.scaled_dot_product_attention
        assert torch.equal(held(rows, rows, rows, dropout_p=0.5, is_causal=True), right)
        assert torch.equal(held(rows, rows, rows, None, 0.5, True), right)
    assert not torch.equal(attention(dropout_p=0.5, is_causal=True), right)
    assert nn.functional.scaled_dot_product_attention is attention.func


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("removed", [("running_mean", "running_var"), ("num_batches_tracked",)])
def test_batch_normalisation_that_lacks_some_of_its_buffers_is_proved_at_bits(removed, momentum):
    def bare():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 1))
        for name in removed:
            setattr(model[1], name, None)
        return model

    data = torch.randn(11, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(11, 1)
    sgd = partial(torch.optim.SGD, lr=0.1)
    job = kway.Job(bare, nn.MSELoss(), sgd, data, batch_size=6, precision="fp64")
    proof = kway.prove(job, devices="cpu:1", exactness="bits", shards=2, steps=2)
    assert proof.verdict == "pass", str(proof)
