"""Ranks whose copies of the weights have drifted apart are an error where weights are read, saved or judged."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import kway
from kway.comm.group import Group
from kway.strategies import replicas
from kway.strategies.data import check_trained
from kway.strategies.replicas import checksum, mixed

X = torch.arange(40.0, dtype=torch.float64).reshape(10, 4) / 40
Y = X.sum(1, keepdim=True)


def plain():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


PLAIN_SGD = partial(torch.optim.SGD, lr=0.1)


def job(optimizer=PLAIN_SGD, model=plain):
    return kway.Job(
        model=model, loss=nn.MSELoss(), data=(X, Y), validation=(X, Y), precision="fp64", batch_size=5,
        optimizer=optimizer,
    )  # fmt: skip


def drifting(context, level, where, folder, by=1e-3):
    """Move one weight of one rank after a step; return what then reading, saving or judging raised."""
    with kway.parallel(job(), strategy="data", exactness=level) as p:
        for batch in p.batches(0):
            p.step(batch)
        if p.rank == 1:
            with torch.no_grad():
                p.model[2].weight[0, 1] += by
        try:
            if where == "evaluate":
                p.evaluate()
            elif where == "save":
                p.save(folder)
            else:
                p.checkpoint(folder, epoch=1)
        except kway.KwayError as error:
            return error
        return None


@pytest.mark.parametrize(
    ("level", "where"),
    [("math", "evaluate"), ("bits", "save"), ("loose", "checkpoint"), ("math", "checkpoint")],
)
def test_a_weight_that_moved_on_one_rank_is_named(ranks, tmp_path, level, where):
    found = ranks.run(drifting, level, where, tmp_path / "saved")
    for error in found:
        assert isinstance(error, kway.ReplicaError)
        assert "'2.weight' on rank 1 is not what rank 0 holds, by up to 0.001" in str(error)
    assert not list(tmp_path.glob("saved/*"))


def rounded(context, level, alike=False):
    """Move one weight of one rank by rounding; return the weights after an evaluation, and what was said.

    ``alike``: ranks know that their devices round alike.
    """
    kind = "one" if alike else f"kind {context.world.rank}"
    with (
        mock.patch("kway.strategies.data.rounds_as", return_value=kind),
        kway.parallel(job(), strategy="data", exactness=level) as p,
    ):
        for batch in p.batches(0):
            p.step(batch)
        for _ in range(2):
            if p.rank == 1:
                with torch.no_grad():
                    p.model[2].weight[0, 1] += 1e-12
            p.evaluate()
        return p.model[2].weight.detach().clone(), p.engine.notices


def test_what_differs_by_rounding_alone_becomes_the_first_rank_s_where_devices_may_round_otherwise(ranks):
    for level in ("math", "loose"):
        (one, said), (other, again) = ranks.run(rounded, level)
        assert torch.equal(one, other)
        assert said == again
        assert len(said) == 1
        assert "brought to the first rank's" in said[0]
        assert "'2.weight' on rank 1, by up to 1e-12" in said[0]
    with pytest.raises(
        kway.ReplicaError, match=r"'2.weight' on rank 1 is not what rank 0 holds, by up to 1e-12"
    ):
        ranks.run(rounded, "bits")
    with pytest.raises(
        kway.ReplicaError, match=r"'2.weight' on rank 1 is not what rank 0 holds, by up to 1e-12"
    ):
        ranks.run(rounded, "math", True)


def one_far(context):
    """Move a small weight far, and a large one less than rounding may."""
    with (
        mock.patch("kway.strategies.data.rounds_as", return_value=str(context.world.rank)),
        kway.parallel(job(), strategy="data") as p,
        torch.no_grad(),
    ):
        p.model[0].weight[0, 0] = 1e9
        if p.rank == 1:
            p.model[0].weight[0, 0] += 0.5
            p.model[2].weight[0, 0] += 0.1
        p.evaluate()


def test_one_parameter_that_is_far_off_is_an_error_whatever_the_others(ranks):
    with pytest.raises(
        kway.ReplicaError, match=r"'2.weight' \(and 1 other parameter\) on rank 1 .* by up to 0.1"
    ):
        ranks.run(one_far)


def counted(context):
    net = plain().double()
    net.number = nn.Parameter(torch.arange(4), requires_grad=False)
    with kway.parallel(job(model=net), strategy="data") as p:
        if p.rank == 1:
            p.model.number[2] = 7
        p.evaluate()


def test_whole_numbers_are_compared_too(ranks):
    with pytest.raises(kway.ReplicaError, match=r"'number' on rank 1 .* by up to 5"):
        ranks.run(counted)


def reordered(context):
    with kway.parallel(job(), strategy="data") as p:
        if p.rank == 1:
            layer = p.model[0]
            layer._parameters = dict(reversed(layer._parameters.items()))
        with pytest.raises(kway.ReplicaError, match="the same parameters and buffers in another order"):
            p.evaluate()
    return True


def test_parameters_in_another_order_are_an_error(ranks):
    assert ranks.run(reordered) == [True, True]


class Drawn(torch.optim.SGD):
    """Adds noise from a generator that knows the rank."""

    def __init__(self, parameters, rank):
        super().__init__(parameters, lr=0.1)
        self.generator = torch.Generator().manual_seed(rank)

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randn(parameter.shape, generator=self.generator, dtype=parameter.dtype)
                parameter.add_(noise, alpha=1e-3)


def noisy(context, alike):
    rank = context.world.rank
    with kway.parallel(job(partial(Drawn, rank=0 if alike else rank)), strategy="data") as p:
        for batch in p.batches(0):
            p.step(batch)
        try:
            p.evaluate()
        except kway.ReplicaError as error:
            return str(error)
        return None


def test_an_optimizer_that_draws_by_rank_is_found_and_one_that_does_not_is_left_alone(ranks):
    assert ranks.run(noisy, True) == [None, None]
    one, other = ranks.run(noisy, False)
    assert one == other
    assert "parameter '0.weight' (and 3 other parameters) on rank 1" in one


def unlike(context):
    with kway.parallel(job(), strategy="data") as p:
        if p.rank == 1:
            p.model.more = nn.Parameter(torch.zeros(2))
        with pytest.raises(kway.ReplicaError, match=r"'more' is .*not there.* one of one shape on all ranks"):
            p.evaluate()
    return True


def test_a_parameter_that_one_rank_alone_has_is_named(ranks):
    assert ranks.run(unlike) == [True, True]


def resized(context):
    net = plain().double()
    net.register_buffer("own", torch.zeros(2))
    with kway.parallel(job(model=net), strategy="data") as p:
        if p.rank == 1:
            p.model.own = torch.zeros(3)
        with pytest.raises(kway.ReplicaError) as caught:
            p.evaluate()
    return str(caught.value)


def test_a_buffer_of_another_shape_is_named(ranks):
    assert "buffer 'own' is of shape (2,), float64 on rank 0 and of shape (3,)" in ranks.run(resized)[0]


def frozen_by_rank(context, reordered):
    net = plain()
    if context.world.rank == 1 and reordered:
        net[0]._parameters = dict(reversed(net[0]._parameters.items()))
    elif context.world.rank == 1:
        net[2].requires_grad_(False)
    expected = "in another order" if reordered else "'2.bias' is trained on one of ranks"
    with pytest.raises(kway.UsageError, match=f"{expected}.*all ranks must train the same"):
        check_trained(net, Group(context.world.rank, context.world.size))
    return True


@pytest.mark.parametrize("reordered", [False, True])
def test_ranks_that_train_other_parameters_are_refused(ranks, reordered):
    assert ranks.run(frozen_by_rank, reordered) == [True, True]


# How a CPU computes it, and how other devices do.
BOTH = pytest.mark.parametrize("checksum", [checksum, mixed], ids=["on the host", "on a device"])


@BOTH
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7),
        torch.randn(3, 5, dtype=torch.float64).t(),
        torch.randn(8)[::2],
        torch.randn(8, dtype=torch.float64)[::8],
        torch.randn(4, dtype=torch.complex128)[::4].imag,
        torch.randn(3, 3).diagonal(),
        torch.randn(4, dtype=torch.bfloat16),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.tensor(2.0),
        torch.tensor([float("nan"), 1.0]),
    ],
)
def test_any_number_that_changes_and_any_two_that_trade_places_change_the_checksum(tensor, checksum):
    cpu = torch.device("cpu")
    own = checksum([tensor], cpu)
    assert own.shape == ()
    assert own.dtype == torch.int64
    assert torch.equal(own, checksum([tensor.clone()], cpu))
    for place in range(tensor.numel()):
        other = tensor.clone().contiguous()
        # No draw is so large: of bfloat16 a smaller number may be what was there.
        other.view(-1)[place] = 100.5
        assert not torch.equal(own, checksum([other], cpu)), place
    if tensor.numel() > 1:
        assert not torch.equal(own, checksum([tensor.clone().contiguous().view(-1).flip(0)], cpu))


@BOTH
def test_what_is_longer_than_a_piece_counts_by_place_too(monkeypatch, checksum):
    monkeypatch.setattr(replicas, "_PIECE", 3)
    cpu, tensor = torch.device("cpu"), torch.arange(1.0, 11)
    traded = torch.cat([tensor[3:6], tensor[:3], tensor[6:]])
    assert checksum([tensor], cpu) != checksum([traded], cpu)
    assert checksum([torch.empty(0)], cpu) == 0


@BOTH
def test_tensors_of_several_sizes_count_together(monkeypatch, checksum):
    monkeypatch.setattr(replicas, "_PIECE", 4)
    cpu = torch.device("cpu")
    held = [
        torch.ones(3),
        torch.ones(2, dtype=torch.float64),
        torch.empty(0),
        torch.ones(5),
        torch.ones(2).half(),
    ]
    own = checksum(held, cpu)
    assert own == checksum([each.clone() for each in held], cpu)
    for each in held:
        for place in range(len(each)):
            each[place] += 1
            assert own != checksum(held, cpu)
            each[place] -= 1


@BOTH
@pytest.mark.parametrize(
    "changed",
    [
        lambda w: w * 2,
        lambda w: -w,
        lambda w: w / 2,
        lambda w: w.flip(0),
        lambda w: w.roll(1),
        torch.zeros_like,
    ],
    ids=["doubled", "negated", "halved", "flipped", "rolled", "zero"],
)
@pytest.mark.parametrize(
    "own",
    [
        torch.randn(2048, 1024), torch.randn(8, 8, dtype=torch.float64), torch.randn(4, 10, dtype=torch.float64),
        torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(6, 6, dtype=torch.complex128),
    ],
    ids=lambda own: f"{own.dtype}-{len(own)}",
)  # fmt: skip
def test_what_changes_all_numbers_alike_changes_the_checksum(own, changed, checksum):
    cpu = torch.device("cpu")
    assert checksum([own], cpu) != checksum([changed(own)], cpu)
    if own.is_complex():
        assert checksum([own], cpu) != checksum([own.conj()], cpu)
