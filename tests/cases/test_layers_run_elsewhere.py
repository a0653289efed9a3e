"""Layers with statistics that run outside of a step's own share: in a penalty, or for another open job."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(26, 5, generator=DRAW, dtype=torch.float64)
Y = torch.randint(3, (26,), generator=DRAW)


def job_of(**more):
    options = {
        "loss": nn.CrossEntropyLoss(), "data": (X, Y), "batch_size": 13,
        "optimizer": partial(torch.optim.SGD, lr=0.1), "precision": "fp64", "name": "m",
    }  # fmt: skip
    return kway.Job(**{**options, **more})


PROBE = torch.randn(4, 5, generator=DRAW, dtype=torch.float64)


def normed():
    return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))


def of_probe(model):
    return 0.1 * model(PROBE).square().mean()


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_a_penalty_that_runs_the_model_moves_its_statistics_once(trained, exactness):
    job = job_of(model=normed, penalty=of_probe)
    one, *others = [
        trained(job, size, exactness=exactness, shards=3).model.state_dict() for size in (1, 2, 3)
    ]
    for other in others:
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-13)


class Pair(nn.Module):
    """Two networks with batch normalisation, of which a job trains one."""

    def __init__(self, first, second, which):
        super().__init__()
        self.first, self.second, self.which = first, second, which

    def forward(self, x):
        return (self.second(self.first(x)) if self.which else self.first(x)).square().sum(), len(x)


def together(context, exactness):
    """Step two jobs over the same two networks in turns; return their state."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).double()
    second = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def part(which):
        def optimizer(named):
            return torch.optim.SGD([p for n, p in named if n.startswith(("first", "second")[which])], lr=0.1)

        return job_of(
            model=Pair(first, second, which), loss=None, data=X, optimizer=optimizer, name=f"p{which}"
        )

    options = {"strategy": "data", "exactness": exactness, "shards": 3}
    with kway.parallel(part(0), **options) as a, kway.parallel(part(1), **options) as b:
        for batch in a.batches(0):
            a.step(batch)
            b.step(batch)
        state = {name: value.clone() for name, value in a.model.state_dict().items()}
    assert not any("forward" in vars(module) for module in a.model.modules())
    return state


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_layers_of_two_open_jobs_compute_for_the_one_that_steps(ranks, exactness):
    one, *others = [state for size in (1, 2, 3) for state in ranks.run(together, exactness, size=size)]
    for other in others:
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=0 if exactness == "bits" else 1e-12)
