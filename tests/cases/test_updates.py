"""What happens to a gradient once it is whole: clipping, optimizer, schedule, and parameters nobody used."""

from functools import partial

import pytest
import torch
from tests.pairwise import pairwise
from torch import nn

import kway

SGD = partial(torch.optim.SGD, lr=1.0)


def own(output, _):
    return output


class Dot(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, x):
        return x @ self.w


def job_of(model, data, **more):
    more = {"optimizer": SGD, "precision": "fp64", "shuffle": False, "batch_size": len(data[0]), **more}
    return kway.Job(model=model, loss=own, data=data, **more)


ROWS = [[6.0, 8.0], [0.0, 0.0]]
FOUR = [[12.0, 0.0], [0.0, 16.0], [0.0, 0.0], [0.0, 0.0]]


CLIPS = [
    (5.0, [3.0, 4.0]),  # clipped before the reduction it would be [1.5, 2]
    (2.5, [1.5, 2.0]),
    (("norm", 1.0), [0.6, 0.8]),
    (("value", 3.5), [3.0, 3.5]),
    (("value", 0.5), [0.5, 0.5]),
    (None, [3.0, 4.0]),
]


@pytest.mark.parametrize(
    ("case", "size", "micro_batch", "rows"), pairwise(CLIPS, [1, 2, 3], [1, None], [ROWS, FOUR])
)
def test_w22_clipping_acts_on_the_reduced_gradient(trained, case, size, micro_batch, rows):
    clip, right = case
    x = torch.tensor(rows, dtype=torch.float64)
    run = trained(job_of(Dot, (x, x[:, 0]), clip=clip, micro_batch=micro_batch), size)
    assert (-run.model.w.detach()).tolist() == pytest.approx(right, rel=1e-6)


class Two(nn.Module):
    """Uses ``a`` always, and ``b`` in the first ``until`` forward passes."""

    def __init__(self, until=0):
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.until, self.passes = until, 0
        for layer in (self.a, self.b):
            nn.init.ones_(layer.weight)

    def forward(self, x):
        self.passes += 1
        return (self.a(x) + (self.b(x) if self.passes <= self.until else 0)).squeeze(1)


ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)


def states(session):
    for batch in session.batches(0):
        session.step(batch)
    used = {name: len(session.engine.optimizer.state[p]) for name, p in session.model.named_parameters()}
    return used, session.model.b.weight.item(), session.model.b.weight.grad


@pytest.mark.parametrize("size", [2, 3])
def test_w23_a_parameter_that_nobody_used_stays(looped, size):
    x = torch.arange(1.0, 10.0, dtype=torch.float64).unsqueeze(1)
    job = job_of(Two, (x, x), optimizer=ADAMW, batch_size=3)
    for used, b, gradient in looped(job, states, size):
        assert used["a.weight"] > 0
        assert (used["b.weight"], b, gradient) == (0, 1.0, None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_w23_momentum_does_not_move_what_is_no_longer_used(trained, size):
    x = torch.arange(1.0, 9.0, dtype=torch.float64).unsqueeze(1)
    momentum = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    run = trained(job_of(partial(Two, 1), (x, x), optimizer=momentum, batch_size=4), size)
    assert run.record.steps == 2
    assert run.model.b.weight.item() == pytest.approx(1 - 0.01 * 2.5, rel=1e-14)
    run = trained(job_of(partial(Two, 2), (x, x), optimizer=momentum, batch_size=4), size)
    assert run.model.b.weight.item() == pytest.approx(1 - 0.025 - 0.9 * 0.025 - 0.065, rel=1e-13)


class SecondHalf(Two):
    """Uses ``b`` only where the share holds the large samples."""

    def forward(self, x):
        y = self.a(x)
        return (y + self.b(x) if float(x.max()) > 50 else y).squeeze(1)


def test_w23_a_parameter_used_on_one_rank_gets_its_sum_over_the_global_batch(looped):
    x = torch.tensor([[1.0], [2.0], [60.0], [80.0]], dtype=torch.float64)
    results = looped(job_of(SecondHalf, (x, x)), states)
    assert [b for _, b, _ in results] == [1 - 140 / 4] * 2
    assert [float(gradient) for *_, gradient in results] == [35.0] * 2


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x):
        return self.layer(x).squeeze(1)


def unfreeze(session):
    session.model.layer.weight.requires_grad_(True)
    (batch,) = session.batches(0)
    session.step(batch)
    return session.model.layer.weight.item()


def frozen():
    model = Slope()
    model.layer.weight.requires_grad_(False)
    return model


X_1_2 = torch.tensor([[1.0], [2.0]], dtype=torch.float64)


def test_w24_a_parameter_that_is_unfrozen_later_is_reduced(looped):
    assert looped(job_of(frozen, (X_1_2, X_1_2)), unfreeze) == [1 - 1.5] * 2  # not 0 and -1


def replace_weight(session, told=True):
    session.model.layer.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
    if told:
        group = {"params": [("layer.weight", session.model.layer.weight)]}
        session.engine.optimizer.add_param_group(group)
    (batch,) = session.batches(0)
    session.step(batch)
    return session.model.layer.weight.item()


def test_w24_a_parameter_that_is_replaced_and_handed_over_is_reduced(looped):
    assert looped(job_of(Slope, (X_1_2, X_1_2)), replace_weight) == [1 - 1.5] * 2


def add_layer(session):
    session.model.more = nn.Linear(1, 1)
    (batch,) = session.batches(0)
    session.step(batch)


def refused(change):
    def loop(session):
        try:
            return change(session)
        except kway.UsageError as error:
            return str(error)

    return loop


def test_w24_a_parameter_that_the_optimizer_does_not_know_is_an_error(looped):
    for change, name in ((partial(replace_weight, told=False), "layer.weight"), (add_layer, "more.weight")):
        for said in looped(job_of(Slope, (X_1_2, X_1_2)), refused(change)):
            assert name in said
            assert "add_param_group" in said


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.w * x


ONES = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_w25_the_first_step_of_adam_is_the_first(trained, size):
    run = trained(job_of(One, (ONES, ONES), optimizer=partial(torch.optim.Adam, lr=0.1)), size)
    assert run.model.w.item() == pytest.approx(0.900000001, rel=1e-12)  # not 0.925586


def test_w25_loading_moves_nothing(trained, ranks):
    job = job_of(One, (ONES, ONES), optimizer=ADAMW)
    proof = kway.prove(job, devices="1,2", own_optimizer=True, ranks=ranks, echo=False)
    assert proof.verdict == "pass", proof.candidates


def linear_decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 2, None])
def test_w27_a_schedule_advances_once_an_optimizer_step(trained, size, micro_batch):
    job = job_of(One, (ONES, ONES), schedule=linear_decay, micro_batch=micro_batch)
    run = trained(job, size, epochs=10)
    assert [row["lr"] for row in run.epochs] == pytest.approx([1 - k / 10 for k in range(1, 11)], abs=1e-12)
    # The sum of 1, 0.9, ..., 0.1; advanced once a process, it would be 3.
    assert run.model.w.item() == pytest.approx(1 - 5.5, rel=1e-13)
