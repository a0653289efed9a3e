"""``kway.evaluate`` and ``kway.predict`` of the model that a loop trains, between two steps and on several ranks."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import kway

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(22, 5, generator=DRAW, dtype=torch.float64)
Y = torch.randint(3, (22,), generator=DRAW)


class Counting(nn.Module):
    """Keeps what depends on the samples that a rank sees."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum(0)
        return self.layers(x)


def normed():
    return Counting().layers


def plain():
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def job_of(model):
    return kway.Job(
        model=model, loss=nn.CrossEntropyLoss(), data=(X, Y), validation=(X, Y), batch_size=11, precision="fp64",
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip


HOW = {
    "own": lambda p, job: p.evaluate(),
    "evaluate": lambda p, job: kway.evaluate(job),
    "predict": lambda p, job: kway.predict(job),
}


def loop(context, make, level, how):
    """Train two epochs and judge between steps; return the figures and what the rank holds then."""
    torch.manual_seed(1)
    job = job_of(make().double())
    found = []
    with kway.parallel(job, strategy="data", exactness=level, shards=3) as p:
        for epoch in range(2):
            for batch in p.batches(epoch):
                p.step(batch)
                found.append(HOW[how](p, job))
        assert p.model.training
        state = {name: value.clone() for name, value in p.model.state_dict().items()}
    return found, state


@pytest.mark.parametrize(
    ("make", "level"),
    [(Counting, "math"), (Counting, "loose"), (normed, "bits"), (normed, "math"), (normed, "loose")],
)
def test_a_run_that_is_judged_is_the_one_that_judges_itself(ranks, make, level):
    right = ranks.run(loop, make, level, "own")
    assert all(torch.equal(right[0][1][name], value) for name, value in right[1][1].items())
    for how in ("evaluate", "predict"):
        for (figures, own), (found, state) in zip(right, ranks.run(loop, make, level, how), strict=True):
            assert how == "predict" or [f["loss"] for f in found] == pytest.approx(
                [f["loss"] for f in figures]
            )
            for name, value in own.items():
                assert torch.equal(state[name], value), (how, name)


def drifted(context, level, how, make):
    """Judge after one weight of one rank has moved; return what that raised, and the weight."""
    job = job_of(make().double())
    with kway.parallel(job, strategy="data", exactness=level, shards=3) as p:
        p.step(next(iter(p.batches(0))))
        p.model[0].eval()
        weight = p.model[0].weight
        with torch.no_grad():
            weight[0, 0] = p.rank
        modes = [module.training for module in p.model.modules()]
        with pytest.raises(kway.ReplicaError) as caught:
            HOW[how](p, job)
        assert [module.training for module in p.model.modules()] == modes
        return str(caught.value), float(weight[0, 0])


@pytest.mark.parametrize("level", ["math", "bits", "loose"])
def test_weights_that_have_drifted_are_an_error_and_not_the_first_rank_s(ranks, level):
    for how, make in (("evaluate", plain), ("predict", normed)):
        found = ranks.run(drifted, level, how, make)
        assert [weight for _, weight in found] == [0, 1]
        assert all("'0.weight' on rank 1 is not what rank 0 holds, by up to 1" in said for said, _ in found)


def of_samples(context):
    job = job_of(normed().double())
    with kway.parallel(job, strategy="data", exactness="bits", shards=3) as p:
        p.model.register_buffer("own", torch.full((2,), float(p.rank)))
        with pytest.raises(kway.RefusedError, match="buffer 'own' differs between devices: exactness bits"):
            kway.evaluate(job)
    return True


def test_a_buffer_that_breaks_bits_is_refused_as_the_job_itself_does(ranks):
    assert ranks.run(of_samples) == [True, True]


def with_a_head(context):
    """Judge layers of an open job with one of the user's own behind them, which ranks draw by themselves."""
    body = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    torch.manual_seed(context.world.rank)
    head = nn.Linear(3, 3).double()
    with kway.parallel(job_of(body), strategy="data") as p:
        p.step(next(iter(p.batches(0))))
        kway.evaluate(job_of(nn.Sequential(body, head)))
        assert all(torch.equal(each, p.gather(head.weight)[0]) for each in p.gather(head.weight))
    return not any("_kway_open" in vars(module) for module in (*body.modules(), head))


def test_what_no_job_holds_becomes_the_first_rank_s(ranks):
    assert ranks.run(with_a_head) == [True, True]


def drifted_statistics(context):
    """Move running statistics on one rank only; judge the job's model, and a copy of it on one rank."""
    torch.manual_seed(1)
    job = job_of(normed().double())
    with kway.parallel(job, strategy="data") as p:
        for batch in p.batches(0):
            p.step(batch)
        with torch.no_grad():
            p.model[1].running_mean.add_(context.world.rank)
        kway.evaluate(job)
        model = p.model if context.world.rank == 0 else copy.deepcopy(p.model)
        return p.model[1].running_mean.clone(), kway.evaluate(job_of(model))


def test_statistics_that_one_rank_moved_are_the_first_rank_s_and_a_copy_is_judged_with_it(ranks):
    (mean, figures), (other, others) = ranks.run(drifted_statistics, limit=60)
    assert torch.equal(mean, other)
    assert figures == others
