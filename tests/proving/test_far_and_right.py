"""Many units apart and right: said where a proof passes so."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.jobs.judges import far_and_right, magnified

# Each is there with both signs but for a rest of 1e-8: gradients are that rest, and the rounding of a hundred.
HALF = 100 * torch.rand(31, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X = torch.cat([HALF, -HALF, torch.full((1, 1), 63e-8, dtype=torch.float64)])


def net():
    return nn.Linear(1, 1, bias=False)


def mean_output(output, target):
    return output[:, 0]


def proof_of(optimizer, ranks):
    job = kway.Job(net, mean_output, optimizer, (X, torch.zeros(63)), batch_size=63)
    return kway.prove(
        job, devices="1,2", precision="fp64", own_optimizer=True, steps=1, ranks=ranks, echo=False
    )


@pytest.mark.parametrize(
    ("optimizer", "divides"),
    [(partial(torch.optim.AdamW, lr=1e-3), True), (partial(torch.optim.SGD, lr=1e-3), False)],
)
def test_rounding_that_an_optimizer_magnifies_is_explained_where_it_passes(ranks, optimizer, divides):
    proof = proof_of(optimizer, ranks)
    assert proof.verdict == "pass"
    # By plain SGD the weight is as far off as the gradient, which is nothing beside it.
    assert any("model/weight" in row["by_noise"] for row in proof.candidates) == divides
    assert (max(row["max_ulps"] for row in proof.candidates) > 1e3) == divides
    notes = [text for text in proof.notices if " ulps are right here: " in text]
    assert ["AdamW divides by the root of squared gradients" in text for text in notes] == [True] * divides


class Wrong(nn.Linear):
    """Gives another output for a part of the batch than for the whole."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-6 * (len(x) < 63))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, lr=1e-3)])
def test_a_proof_that_fails_says_where_its_optimizer_may_have_magnified_rounding(ranks, optimizer):
    job = kway.Job(partial(Wrong, 1, 1), mean_output, optimizer, (X, torch.zeros(63)), batch_size=63)
    proof = kway.prove(job, devices="2", own_optimizer=True, steps=1, ranks=ranks, echo=False)
    assert proof.verdict == "fail"
    said = [text for text in proof.notices if "The proof with SGD" in text]
    adaptive = optimizer is torch.optim.AdamW
    assert [text.startswith("AdamW divides by the root") for text in said] == [True] * adaptive
    # SGD itself is what the proof takes then: nothing is left to be told apart.
    taken = kway.prove(job, devices="2", steps=1, ranks=ranks, echo=False)
    assert taken.verdict == "fail"
    assert not any("The proof with SGD" in text for text in taken.notices)


def test_bits_that_differ_are_no_rounding():
    class Adam:
        divides = "Adam"

    assert magnified(Adam, [{"equal": "no", "level": "bits", "reason": ""}]) == []
    assert magnified(Adam, [{"equal": "refused", "level": "math"}]) == []


def test_of_what_fails_nothing_is_said_to_be_right():
    class Adam:
        divides = "Adam"

    far = {"equal": "ulps", "by_noise": ["gradient/w", "model/w"], "max_ulps": 41_300.0}
    (said,) = far_and_right(Adam, [far, {"equal": "skipped"}])
    assert said == (
        "up to 4.130e+04 ulps are right here: another order of the samples moves 2 tensors (model/w, ...) by as much "
        "on one device; Adam divides by the root of squared gradients, and magnifies rounding where it is tiny"
    )
    assert far_and_right(Adam, [far, {"equal": "no"}]) == []
    assert far_and_right(Adam, [{**far, "by_noise": []}]) == []


class Attending(nn.Module):
    """The gradient of the keys' bias is zero in mathematics: all scores of a query move by as much."""

    def __init__(self):
        super().__init__()
        self.start, self.qkv, self.last = nn.Embedding(23, 64), nn.Linear(64, 192), nn.Linear(64, 23)

    def forward(self, x):
        parts = self.qkv(self.start(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.last(seen.transpose(1, 2).flatten(2)).transpose(1, 2)


def test_rounding_within_a_sample_that_an_optimizer_magnifies_passes(ranks):
    numbers = torch.randint(23, (126, 33), generator=torch.Generator().manual_seed(1))
    adam = partial(torch.optim.AdamW, lr=3e-3)
    job = kway.Job(Attending, nn.CrossEntropyLoss(), adam, (numbers[:, :-1], numbers[:, 1:]), batch_size=63)
    proof = kway.prove(job, devices="1,2", own_optimizer=True, ranks=ranks, echo=False)
    assert proof.verdict == "pass", proof.candidates


class Hidden(nn.Module):
    """Leaves a frozen weight out of its state_dict, as adapters do with the model that they adapt."""

    def __init__(self):
        super().__init__()
        self.frozen, self.last = nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 3)
        self.register_state_dict_post_hook(self.leave_out)
        self.register_load_state_dict_post_hook(self.miss_nothing)

    @staticmethod
    def leave_out(module, state, prefix, metadata):
        del state["frozen.weight"]

    @staticmethod
    def miss_nothing(module, keys):
        keys.missing_keys.clear()

    def forward(self, x):
        return self.last(self.frozen(x).tanh())


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (partial(nn.Linear, 4, 3), partial(torch.optim.NAdam, lr=1e-3)),
        (Hidden, partial(torch.optim.SGD, lr=0.1)),
    ],
)
def test_each_repeat_of_a_step_starts_from_the_same_state(ranks, model, optimizer):
    """NAdam keeps numbers of another type than its parameters."""
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(26, 4, generator=draw), torch.randint(3, (26,), generator=draw)
    job = kway.Job(model, nn.CrossEntropyLoss(), optimizer, data, batch_size=13)
    proof = kway.prove(job, devices="1,2", own_optimizer=True, ranks=ranks, echo=False)
    assert proof.verdict == "pass", [row["reason"] for row in proof.candidates]
    assert max(row["max_ulps"] for row in proof.candidates) < 8
