"""The moving average of the weights: what it is, what is judged by it, and that training never sees it."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import kway
from kway.training.weights import fingerprint, unique_names

SGD = partial(torch.optim.SGD, lr=1.0)
LEVELS = [("math", 1), ("math", 2), ("math", 3), ("loose", 2), ("bits", 1), ("bits", 2), ("bits", 3)]


class Ramp(nn.Module):
    """One weight of five numbers that grows by the learning rate a step: the loss is minus their sum."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(5.0, dtype=torch.float64))

    def forward(self, x):
        return -self.w.sum() * torch.ones_like(x)


def own(output, _):
    return output


ONES = torch.ones(4, dtype=torch.float64)


def ramp(**more):
    more = {"batch_size": 2, "ema": 0.9, "precision": "fp64", "validation": (ONES, ONES), **more}
    return kway.Job(model=Ramp, loss=own, optimizer=SGD, data=(ONES, ONES), **more)


@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_w35_the_average_is_judged_and_kept_and_the_weights_come_back(trained, level, size, tmp_path):
    run = trained(
        ramp(), size, exactness=level, shards=4, validate_every="1steps", save_best="validation_loss",
        out=tmp_path / "run",
    )  # fmt: skip
    right = torch.tensor([0.29, 1.29, 2.29, 3.29, 4.29], dtype=torch.float64)
    torch.testing.assert_close(run.ema["w"], right, rtol=0, atol=1e-12)
    assert run.model.w.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert run.epochs[0]["validation_loss"] == pytest.approx(
        -11.45, rel=1e-13
    )  # the weights by themselves: -20
    assert run.epochs[0]["train_loss"] == -12.5
    assert run.record.best == {
        "metric": "validation_loss", "value": run.epochs[0]["validation_loss"], "epoch": 1, "step": 2,
    }  # fmt: skip
    for name in ("ema", "best"):
        assert torch.equal(load_file(tmp_path / "run" / f"{name}.safetensors")["w"], run.ema["w"])
    assert torch.equal(load_file(tmp_path / "run" / "weights.safetensors")["w"], run.model.w)


def test_w35_the_record_says_what_was_judged(trained):
    run = trained(ramp(), 2)
    assert (run.record.ema, run.record.ema_sha256) == (0.9, fingerprint(run.ema, ["w"]))
    assert any("moving average of the weights (ema=0.9)" in text for text in run.record.notices)
    bare = trained(ramp(ema=None), 2)
    assert (bare.ema, bare.record.ema, bare.record.ema_sha256) == (None, None, None)
    assert not any("average" in text for text in bare.record.notices)
    assert bare.epochs[0]["validation_loss"] == -20.0
    assert not any("validation" in text for text in trained(ramp(validation=None), 1).record.notices)


def ramp_loop(session, folder):
    for batch in session.batches(0):
        session.step(batch)
    judged = session.evaluate()["loss"]
    session.save(folder)
    return judged, session.model.w.tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_w35_a_loop_of_one_s_own_judges_and_saves_the_average(looped, tmp_path, size):
    for judged, weights in looped(ramp(), partial(ramp_loop, folder=tmp_path), size):
        assert judged == pytest.approx(-11.45, rel=1e-13)
        assert weights == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert load_file(tmp_path / "ema.safetensors")["w"].sum() == pytest.approx(11.45, rel=1e-13)
    assert load_file(tmp_path / "weights.safetensors")["w"].sum() == 20.0


G = torch.Generator().manual_seed(0)
X, Y = torch.randn(23, 3, generator=G), torch.arange(23) % 4
HELD = torch.randn(7, 3, generator=G), torch.arange(7) % 4


class Net(nn.Module):
    """Tied weights, running statistics, dropout, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(0.7), requires_grad=False)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.third(torch.tanh(self.second(self.drop(hidden)))) * self.scale


def net_job(**more):
    more = {"optimizer": partial(torch.optim.AdamW, lr=0.05), "batch_size": 8, "ema": 0.8, **more}
    more = {"metrics": {"accuracy": kway.accuracy}, "validation": HELD, "micro_batch": None, **more}
    return kway.Job(**{"model": Net, "loss": nn.CrossEntropyLoss(), "data": (X, Y), **more})


def judged(run):
    left_out = {"seconds", "samples_per_s"}
    rows = [{key: value for key, value in row.items() if key not in left_out} for row in run.epochs]
    return run.record.ema_sha256, run.record.weights_sha256, rows


def bits_alone(context, job):
    return judged(kway.train(job, devices="cpu:1", exactness="bits", shards=4, epochs=2))


def test_the_average_has_the_same_bits_on_any_number_of_devices(ranks, trained):
    # In a rank of the pool: bits hold within one number of threads.
    (alone,) = ranks.run(bits_alone, net_job(batch_size=12), size=1)
    for size in (2, 3, 4):
        assert judged(trained(net_job(batch_size=12), size, exactness="bits", shards=4, epochs=2)) == alone


def prove(job, ranks, **more):
    return kway.prove(
        job, devices="1,2,3", exactness="bits", shards=3, own_optimizer=True, ranks=ranks, echo=False, **more
    )


def test_a_proof_of_bits_looks_at_the_average_too(ranks, tmp_path):
    proof = prove(net_job(), ranks, out=tmp_path)
    assert proof.verdict == "pass", [row["reason"] for row in proof.candidates]
    assert "average" in proof.certificate["steps"][0]
    again = prove(net_job(), ranks, against=tmp_path / "proof.json")
    assert (again.verdict, again.against["disagreement"]) == ("pass", None)
    other = prove(net_job(ema=0.9), ranks, against=tmp_path / "proof.json")
    assert other.against["disagreement"] == "average of step 1 differ"
    # One tensor more for each of the parameters, of which one is tied, at each of three steps.
    bare = prove(net_job(ema=None), ranks)
    more = len(list(Net().parameters())) * 3
    assert proof.candidates[0]["tensors"] == bare.candidates[0]["tensors"] + more
    assert "average" not in bare.certificate["steps"][0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_average_of_every_device_count_and_of_the_same_weights(trained, size):
    job = net_job(precision="fp64", model=NoDrop, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    run, plain = (trained(kway.Job(**{**vars(job), "ema": ema}), size, epochs=2) for ema in (0.8, None))
    assert run.record.weights_sha256 == plain.record.weights_sha256  # the average never touches training
    alone = trained(job, 1, epochs=2)
    for name, value in alone.ema.items():
        torch.testing.assert_close(run.ema[name], value, rtol=0, atol=1e-12)


class NoDrop(Net):
    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()


def test_the_file_loads_into_a_bare_model_and_gives_the_judged_figures(trained, tmp_path):
    run = trained(net_job(), 2, epochs=2, out=tmp_path / "run")
    state = load_file(tmp_path / "run" / "ema.safetensors")
    bare = Net()
    bare.load_state_dict(state, strict=True)
    assert bare.third.weight is bare.second.weight
    assert fingerprint(bare.state_dict(), unique_names(bare)) == run.record.ema_sha256
    found = kway.evaluate(net_job(), tmp_path / "run" / "ema.safetensors", devices="cpu:1")
    assert found["loss"] == pytest.approx(run.epochs[-1]["validation_loss"], rel=1e-5)
    assert found["accuracy"] == run.epochs[-1]["accuracy"]
    live = load_file(tmp_path / "run" / "weights.safetensors")
    # Running statistics are averages already, and stay as they are; so do weights that are not trained.
    same = {name for name, value in live.items() if torch.equal(value, state[name])}
    assert same == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "scale"}


def test_a_folder_that_holds_an_average_is_not_written_over(trained, tmp_path):
    (tmp_path / "ema.safetensors").write_bytes(b"mine")
    with pytest.raises(kway.UsageError, match=r"already holds ema\.safetensors"):
        trained(ramp(), 1, out=tmp_path)
    assert (tmp_path / "ema.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("wrong", [0, 1, 1.5, -0.1, "0.9", True, float("nan")])
def test_a_decay_that_is_none(wrong):
    with pytest.raises(kway.UsageError, match="ema="):
        ramp(ema=wrong)
