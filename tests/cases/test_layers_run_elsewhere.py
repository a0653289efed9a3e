"""Layers with statistics that run outside of a step's own share: in a penalty, or for another open job."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.devices.compilers import missing

KINDS = [
    "eager",
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(missing("cpu") is not None, reason=f"torch.compile: {missing('cpu')}"),
    ),
]
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


def by_hand(epochs=1):
    """Train as torch does, over the batches that kway takes."""
    with kway.parallel(job_of(model=normed), devices="cpu") as p:
        model = normed().double()
        model.load_state_dict(p.model.state_dict())
        batches = [torch.as_tensor(batch.indices) for batch in p.batches(0)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in batches:
        sgd.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        of_probe(model).backward()
        sgd.step()
    return model.state_dict()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_penalty_that_runs_the_model_moves_its_statistics_once(trained, size):
    found = trained(job_of(model=normed, penalty=of_probe), size).model.state_dict()
    for name, value in by_hand().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_at_bits_too_and_as_often(ranks, trained):
    job = job_of(model=normed, penalty=of_probe)
    one, *others = [trained(job, size, exactness="bits", shards=3).model.state_dict() for size in (1, 2, 3)]
    assert all(torch.equal(other[name], value) for other in others for name, value in one.items())
    assert one["0.num_batches_tracked"] == by_hand()["0.num_batches_tracked"] == 4
    proof = kway.prove(job, devices="1,2", exactness="bits", shards=3, steps=2, ranks=ranks)
    assert proof.verdict == "pass"


def copied(context, exactness):
    """Copy the model after a step, then train on; return what the copy gives before and after."""
    with kway.parallel(job_of(model=normed), strategy="data", exactness=exactness, shards=3) as p:
        first, second = p.batches(0)
        p.step(first)
        own = copy.deepcopy(p.model)
        found = own(X)
        p.step(second)
        return torch.equal(found, own(X)), own.state_dict()


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_a_copy_of_the_model_is_one_of_its_own(ranks, exactness):
    for size in (1, 2):
        for same, state in ranks.run(copied, exactness, size=size):
            assert same
            assert state["0.num_batches_tracked"] == 3


def beside(context, first, second):
    job = job_of(model=normed().double())
    with kway.parallel(job, strategy="data", exactness=first, shards=3) as p:
        with (
            pytest.raises(kway.RefusedError, match=f"part of another open job, at exactness {first}"),
            kway.parallel(job, strategy="data", exactness=second, shards=3),
        ):
            pass
        own = copy.deepcopy(p.model)
    # Neither the layers nor a copy of them are part of anything any more.
    for model in (job.model, own):
        with kway.parallel(job_of(model=model), strategy="data", exactness=second, shards=3):
            pass
    return True


@pytest.mark.parametrize("levels", [("math", "loose"), ("loose", "math"), ("math", "bits"), ("bits", "math")])
def test_jobs_at_two_levels_share_no_layer_with_statistics(ranks, levels):
    for size in (1, 2):
        assert all(ranks.run(beside, *levels, size=size))


@pytest.mark.parametrize("exactness", ["math", "bits", "loose"])
def test_an_open_job_s_model_can_be_evaluated_and_predicted_with(exactness):
    job = job_of(model=normed().double())
    with kway.parallel(job, devices="cpu", exactness=exactness, shards=3) as p:
        p.step(next(iter(p.batches(0))))
        found, outputs = kway.evaluate(job, devices="cpu"), kway.predict(job, devices="cpu")
        right = nn.functional.cross_entropy(p.model.eval()(X), Y)
    assert found["loss"] == pytest.approx(float(right), rel=1e-12)
    assert outputs.shape == (26, 3)


class Pair(nn.Module):
    """Two networks with batch normalisation, of which a job trains one."""

    def __init__(self, first, second, which):
        super().__init__()
        self.first, self.second, self.which = first, second, which

    def forward(self, x):
        return (self.second(self.first(x)) if self.which else self.first(x)).square().sum(), len(x)


def together(context, exactness, kind, samples):
    """Step two jobs over the same two networks in turns, two batches of ``samples`` each; return their state."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).double()
    second = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def part(which):
        def optimizer(named):
            return torch.optim.SGD([p for n, p in named if n.startswith(("first", "second")[which])], lr=0.1)

        return job_of(
            model=Pair(first, second, which), loss=None, data=X[: 2 * samples], batch_size=samples,
            optimizer=optimizer, name=f"p{which}",
        )  # fmt: skip

    options = {"strategy": "data", "exactness": exactness, "shards": 3, "step_kind": kind}
    with kway.parallel(part(0), **options) as a, kway.parallel(part(1), **options) as b:
        for batch in a.batches(0):
            a.step(batch)
            b.step(batch)
        state = {name: value.clone() for name, value in a.model.state_dict().items()}
    assert not any("forward" in vars(module) for module in a.model.modules())
    return state


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_layers_of_two_open_jobs_compute_for_the_one_that_steps(ranks, exactness, kind):
    ways = [(kind, size) for size in (1, 2, 3)]
    samples = 13
    if kind == "compiled":
        # Compilers take long: shares are of one size, and where rounding may differ, the one device is not asked again.
        samples = 12
        ways = [("eager" if exactness == "math" else kind, 1), (kind, 2)]
    one, *others = [
        state
        for way, size in ways
        for state in ranks.run(together, exactness, way, samples, size=size, limit=240)
    ]
    for other in others:
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=0 if exactness == "bits" else 1e-12)


def judged_and_copied(context, kind):
    """Judge the model of an open job between two steps, and copy it; return what differs then."""
    job = job_of(model=normed().double())
    with kway.parallel(job, strategy="data", step_kind=kind) as p:
        for batch in p.batches(0):
            p.step(batch)
            found = kway.evaluate(job)["loss"]
        own, state = copy.deepcopy(p.model), copy.deepcopy(p.model.state_dict())
        own(X)
        assert all(torch.equal(state[name], value) for name, value in p.model.state_dict().items())
    assert not any("forward" in vars(module) for module in p.model.modules())
    return found, float(nn.functional.cross_entropy(p.model.eval()(X), Y))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_judged_and_copied_while_its_job_is_open(ranks, kind):
    for found, right in ranks.run(judged_and_copied, kind, limit=240):
        assert found == pytest.approx(right, rel=1e-12)
