"""A proof is worth something only where it can fail: every usual mistake, made on purpose."""

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import kway

X = torch.randn(13, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(13) % 4


def rank():
    return int(os.environ.get("RANK", "0"))


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


class Biased(nn.Module):
    """Multiplies its output by 1 + factor * rank."""

    def __init__(self, factor):
        super().__init__()
        self.net, self.factor = net(), factor

    def forward(self, x):
        return self.net(x) * (1 + self.factor * rank())


def biased_loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none") * (1 + 1e-6 * rank())


class Shifted(Dataset):
    """Gives other values on another rank."""

    def __len__(self):
        return 13

    def __getitem__(self, index):
        return X[index] + 1e-6 * rank(), Y[index]


class Counting(nn.Module):
    """Has a buffer that another rank changes in another way."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1 + rank()
        return self.net(x)


class Paced(nn.Module):
    """Keeps a number that its output follows, not in its state_dict; on another rank it is wrong by ``factor``."""

    def __init__(self, factor, buffer=True):
        super().__init__()
        self.net, self.factor, self.kept, self.calls = net(), factor, [0], 0
        if buffer:
            del self.calls
            self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.net(x) * self.calls * (1 + self.factor * rank())


class Restless(Paced):
    """Counts where no proof takes it back."""

    def forward(self, x):
        self.kept[0] += 1
        return self.net(x) * self.kept[0]


class Apart(Paced):
    """Has a buffer that is not in its state_dict, and that another rank changes in another way."""

    def forward(self, x):
        self.calls += 1 + self.factor * rank()
        return self.net(x)


class Binned(nn.Module):
    """Compares whole numbers with bounds that are parameters: the smallest nudge puts them on the other side."""

    def __init__(self, factor):
        super().__init__()
        self.edges, self.factor = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]), requires_grad=False), factor
        self.last = nn.Linear(9, 4)

    def forward(self, x):
        inside = (x[:, :, None] >= self.edges).to(x.dtype).flatten(1)
        return self.last(inside) * (1 + self.factor * rank())


class Jumping(Counting):
    """Every gradient is right, but one weight is moved on one rank in the second forward pass."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        if rank() == 1 and self.passes == 2:
            with torch.no_grad():
                self.seen[1] += 1e-3
        return self.net(x)


def job_of(model=net, loss=None, data=(X, Y), **more):
    more = {"batch_size": 13, **more}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return kway.Job(model=model, loss=loss or nn.CrossEntropyLoss(), optimizer=optimizer, data=data, **more)


def proved(ranks, job, **more):
    more = {"devices": "1,2", **more}
    return kway.prove(job, ranks=ranks, echo=False, **more)


def failing_row(proof):
    assert proof.verdict == "fail"
    alone, two = proof.candidates
    assert alone["equal"] in ("bits", "ulps")
    assert two["equal"] == "no"
    return two


@pytest.mark.parametrize(("precision", "factor"), [("fp64", 1e-6), ("fp32", 1e-3), ("fp64", 1e-10)])
def test_an_output_that_depends_on_the_rank(ranks, precision, factor):
    row = failing_row(proved(ranks, job_of(partial(Biased, factor)), precision=precision))
    assert row["first_difference"] == {"step": 1, "tensor": "loss"}
    assert "loss" in row["reason"]
    assert row["max_abs_diff"] > factor / 100


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_what_a_nudge_makes_jump_hides_no_fault(ranks, precision):
    data = torch.randint(5, (13, 3), generator=torch.Generator().manual_seed(2)).float(), Y
    right, wrong = (
        proved(ranks, job_of(partial(Binned, factor), data=data), precision=precision)
        for factor in (0.0, 1e-3)
    )
    assert right.verdict == "pass"
    assert "loss" in failing_row(wrong)["reason"]


class Mixing(nn.Module):
    """Mixes samples by their places in the batch."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(3, 5), nn.Linear(5, 4), mix

    def forward(self, x):
        return self.last(self.mix(self.first(x)).tanh())


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: 0.7 * h + 0.3 * h.roll(1, 0),
        lambda h: h + 0.1 * h.cumsum(0),
        lambda h: h - 0.5 * h[:1],
        lambda h: torch.cat([h[:-1], 1.1 * h[-1:]]),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_what_goes_by_the_places_of_samples_is_no_rounding(ranks, precision, mix):
    row = failing_row(proved(ranks, job_of(partial(Mixing, mix)), precision=precision))
    assert "loss differs" in row["reason"]
    assert "in another order give another loss" in row["reason"]


def test_a_loss_that_depends_on_the_rank(ranks):
    row = failing_row(proved(ranks, job_of(loss=biased_loss)))
    assert row["first_difference"] == {"step": 1, "tensor": "loss"}


def test_data_that_depend_on_the_rank(ranks):
    row = failing_row(proved(ranks, job_of(data=Shifted())))
    assert row["first_difference"]["step"] == 1
    assert row["first_difference"]["tensor"] in ("loss", "gradient/0.weight")


def test_a_buffer_that_depends_on_the_rank(ranks):
    row = failing_row(proved(ranks, job_of(Counting)))
    assert row["first_difference"] == {"step": 1, "tensor": "model/seen"}
    assert "rank 1" in row["reason"]


def test_a_buffer_changed_on_one_rank_at_the_second_step(ranks):
    row = failing_row(proved(ranks, job_of(Jumping)))
    assert row["first_difference"] == {"step": 2, "tensor": "model/seen"}
    assert "model/seen of rank 1 is not that of rank 0" in row["reason"]


@pytest.mark.parametrize("buffer", [True, False])
def test_what_a_count_outside_the_state_dict_changes_is_no_noise(ranks, buffer):
    row = failing_row(proved(ranks, job_of(partial(Paced, 0.01, buffer))))
    assert row["first_difference"] == {"step": 1, "tensor": "loss"}
    assert proved(ranks, job_of(partial(Paced, 0.0, buffer))).verdict == "pass"


def test_a_buffer_outside_the_state_dict_that_depends_on_the_rank(ranks):
    row = failing_row(proved(ranks, job_of(partial(Apart, 1))))
    assert row["first_difference"] == {"step": 1, "tensor": "model/calls"}


def test_a_reference_that_does_not_repeat_itself_proves_nothing(ranks):
    proof = proved(ranks, job_of(partial(Restless, 0.01)))
    assert [row["equal"] for row in proof.candidates] == ["no", "no"]
    assert "the reference does not repeat itself" in proof.candidates[1]["reason"]


def test_where_the_reference_does_not_repeat_itself_nothing_else_is_suspected(ranks):
    restless = job_of(partial(Restless, 0.01), loss=scalar_mean)
    for exactness in ("math", "bits"):
        proof = proved(ranks, restless, exactness=exactness, devices="1", own_optimizer=True)
        assert proof.verdict == "fail"
        assert "the reference does not repeat itself" in proof.candidates[0]["reason"]
        assert any("the loss returned a scalar" in line for line in proof.notices)
        assert "likely cause" not in str(proof)


def test_means_of_means_are_found(ranks):
    """A loss that weighs each share by itself: what averaging over ranks would give."""
    row = failing_row(proved(ranks, job_of(loss=share_mean), devices="1,2"))
    assert row["shares"][0] == [7, 6]
    assert row["first_difference"] == {"step": 1, "tensor": "loss"}


def share_mean(output, target):
    losses = nn.functional.cross_entropy(output, target, reduction="none")
    return losses.mean(), 1.0


def test_statistics_of_each_rank_are_not_those_of_the_batch(ranks):
    model = partial(nn.Sequential, nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    assert proved(ranks, job_of(model)).verdict == "pass"
    row = failing_row(proved(ranks, job_of(model), exactness="loose"))
    assert row["first_difference"] == {"step": 1, "tensor": "loss"}


def test_the_record_says_what_was_found(ranks, tmp_path):
    proof = proved(ranks, job_of(partial(Biased, 1e-6)), out=tmp_path / "proof")
    saved = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert saved["verdict"] == "fail"
    assert saved["candidates"][1]["first_difference"] == {"step": 1, "tensor": "loss"}
    assert saved["candidates"] == proof.candidates
    with pytest.raises(kway.UsageError, match=r"already holds proof\.json"):
        proved(ranks, job_of(), out=tmp_path / "proof")


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_the_record_says_what_was_proved_and_with_which_optimizer(ranks, exactness):
    job = replace(job_of(seed=3), optimizer=partial(torch.optim.AdamW, lr=0.01))
    proof = proved(ranks, job, exactness=exactness, steps=1)
    assert proof.job["optimizer"]["name"] == "SGD"
    assert proof.job["optimizer"]["groups"][0]["momentum"] == 0.9
    assert any("instead of the job's AdamW" in text for text in proof.notices)
    assert (proof.job["data"], proof.job["samples"]) == ("float32 13x3, int64 13", 13)
    assert proof.job["loss"].startswith("CrossEntropyLoss(")
    assert (proof.seed, proof.versions["torch"]) == (3, torch.__version__)
    assert proof.started
    assert proof.machine["cpu"]
    own = proved(ranks, job, exactness=exactness, steps=1, own_optimizer=True)
    assert (own.job["optimizer"]["name"], own.job["optimizer"]["groups"][0]["lr"]) == ("AdamW", 0.01)
    assert not own.notices
    assert not proved(ranks, job_of(), exactness=exactness, steps=1).notices


def test_a_proof_is_told_by_verdict_and_rows(ranks):
    proof = proved(ranks, job_of(partial(Biased, 1e-6), name="biased"), devices="1,2", steps=1)
    alone, two = proof.candidates
    said = str(proof).splitlines()
    assert said[0] == "proof of biased: fail"
    assert said[1].startswith(f"  data=1 on 1 device: {alone['equal']}")
    assert said[1].endswith(f" in {alone['tensors']} tensors")
    assert said[2] == f"  data=2 on 2 devices: no ({two['reason']})"
    assert repr(proof) == f"Proof(biased: fail; {said[1].strip()}, data=2 on 2 devices: no)"
    proof = proved(ranks, replace(job_of(), optimizer=torch.optim.Adam), devices="1", steps=1)
    assert str(proof).splitlines()[-1] == f"  note: {proof.notices[-1]}"


def test_a_batch_that_every_count_divides_is_made_uneven(ranks):
    proof = proved(ranks, job_of(batch_size=4), devices="2,4", steps=3)
    shares = [row["shares"] for row in proof.candidates]
    assert [sum(step) for step in shares[0]] == [4, 4, 3]
    assert shares[1][-1] == [1, 1, 1, 0]
    assert proof.verdict == "pass"


def test_sizes_that_do_not_fit_are_skipped_with_the_reason(ranks):
    proof = proved(ranks, job_of(), devices="1,2,3", strategy="data=2")
    assert [row["equal"] == "skipped" for row in proof.candidates] == [True, False, True]
    assert "needs 2" in proof.candidates[2]["reason"]
    assert proof.verdict == "pass"
    proof = proved(ranks, job_of(), devices="3", strategy="data=2")
    assert (proof.candidates[0]["equal"], proof.verdict) == ("skipped", "fail")


def test_each_strategy_needs_a_proved_row_on_several_devices(ranks):
    proof = proved(ranks, job_of(), devices="1,2", strategy="single,data")
    assert [row["equal"] for row in proof.candidates].count("skipped") == 1
    assert proof.verdict == "fail"
    assert proved(ranks, job_of(), devices="1", strategy="single").verdict == "pass"


def test_what_is_refused_is_a_row_and_no_proof(ranks):
    model = partial(nn.Sequential, nn.Linear(3, 4), nn.BatchNorm1d(4))
    proof = proved(ranks, job_of(model, micro_batch=7))
    # Shares of 7 and 6 samples are not cut: two devices can do what one cannot.
    assert proof.candidates[0]["equal"] == "refused"
    assert proof.candidates[1]["equal"] in ("bits", "ulps")
    assert "micro_batch=7" in proof.candidates[0]["reason"]
    assert proof.verdict == "fail"
    assert proved(ranks, job_of(model, micro_batch=7), devices="2").verdict == "pass"


def test_a_model_that_no_row_could_train_is_an_error(ranks):
    with pytest.raises(kway.RefusedError, match="DataParallel"):
        proved(ranks, job_of(nn.DataParallel(net())))


def test_dropout_is_off_and_it_is_said(ranks):
    model = partial(nn.Sequential, nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 4))
    proof = proved(ranks, job_of(model))
    assert proof.verdict == "pass"
    assert any("dropout is off" in notice for notice in proof.notices)


def test_the_proof_leaves_the_caller_s_model_and_random_state_alone(ranks):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    proved(ranks, job_of(model))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"steps": 0}, "steps=0"),
        ({"strategy": "dat"}, "data"),
        ({"exactness": "close"}, "math"),
        ({"devices": "cpu:0"}, "cpu:0"),
    ],
)
def test_bad_input_is_one_error(ranks, more, named, tmp_path):
    with pytest.raises(kway.UsageError, match=named):
        proved(ranks, job_of(), out=tmp_path / "proof", **more)
    assert not (tmp_path / "proof").exists()


def scalar_sum(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none").sum().reshape(())


def scalar_mean(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none").mean().reshape(())


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_a_scalar_loss_is_named_and_where_a_proof_fails_it_is_suspected(ranks, exactness):
    wrong = proved(ranks, job_of(loss=scalar_sum), exactness=exactness, steps=1)
    assert wrong.verdict == "fail"
    assert sum("the loss returned a scalar" in line for line in wrong.notices) == 1
    assert "the loss is the likely cause" in str(wrong)
    right = proved(ranks, job_of(loss=scalar_mean), exactness=exactness, steps=1)
    assert right.verdict == "pass"
    assert any("the loss returned a scalar" in line for line in right.notices)
    assert "likely cause" not in str(right)
    other = proved(ranks, job_of(partial(Biased, 1e-3)), exactness=exactness, steps=1)
    assert other.verdict == "fail"
    assert "likely cause" not in str(other)


def test_large_differences_are_told_in_few_digits(ranks):
    proof = proved(ranks, job_of(lambda: nn.Linear(3, 4)), steps=1)
    row = {**proof.candidates[1], "equal": "ulps", "max_ulps": 1.0484573081962928e16}
    assert " ulps, 1.048e+16 at most in " in str(replace(proof, candidates=[row]))
