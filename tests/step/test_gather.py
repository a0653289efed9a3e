"""Losses over all samples of the global batch are those of one device: values, gradients, trained weights."""

from functools import partial

import pytest
import torch
from tests.pairwise import pairwise
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import kway
from kway.comm.group import Group
from kway.data.order import KeyedOrder
from kway.step.gather import WholeBatch, all_samples
from kway.step.presence import Presence

G = torch.Generator().manual_seed(0)
LEFT, RIGHT = (torch.randn(19, 5, generator=G, dtype=torch.float64) for _ in range(2))
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


class Pair(nn.Module):
    """Two towers, one with batch normalisation, which looks at the global batch too."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
        self.right = nn.Linear(5, 3)

    def forward(self, left, right):
        return normalize(self.left(left)), normalize(self.right(right))


def matched(similar):
    """Cross entropy of each row with its own column."""
    return cross_entropy(4 * similar, torch.arange(len(similar)), reduction="none")


def every(output, _):
    """Losses of the global batch as on one device, of which each device returns those of its samples."""
    (left, place), right = all_samples(output[0], place=True), all_samples(output[1])
    return ((matched(left @ right.T) + matched(right @ left.T)) / 2)[place]


def own(output, _):
    """The same, with no more work than the rows of this device's samples."""
    (left, place), right = all_samples(output[0], place=True), all_samples(output[1])
    targets = torch.arange(len(left))[place]
    a = cross_entropy(4 * output[0] @ right.T, targets, reduction="none")
    return (a + cross_entropy(4 * output[1] @ left.T, targets, reduction="none")) / 2


def scalar(output, _):
    """The mean over the global batch, the same on every device."""
    left, right = all_samples(output[0]), all_samples(output[1])
    return (matched(left @ right.T).mean() + matched(right @ left.T).mean()) / 2


class Inside(Pair):
    """Compares in forward, in a part that is computed again."""

    def forward(self, left, right):
        left, right = super().forward(left, right)
        return checkpoint(own, (left, right), None, use_reentrant=False)


def as_it_is(output, _):
    return output


def plain(batch_size):
    """One epoch of whole batches in plain torch."""
    torch.manual_seed(0)
    model = Pair().double()
    optimizer = SGD(model.parameters())
    order = KeyedOrder(len(LEFT), batch_size, 0)
    losses = []
    for step in range(order.steps(0)):
        rows = torch.from_numpy(order.batch(0, step))
        left, right = model(LEFT[rows], RIGHT[rows])
        loss = (matched(left @ right.T).mean() + matched(right @ left.T).mean()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * len(rows))
    return model.state_dict(), sum(losses) / len(LEFT)


def job_of(loss, batch_size, model=Pair, **more):
    data = {"left": LEFT, "right": RIGHT, "label": torch.zeros(19)}
    return kway.Job(
        model=model, loss=loss, optimizer=SGD, data=data, batch_size=batch_size, precision="fp64", **more
    )


WAYS = [(every, Pair), (own, Pair), (scalar, Pair), (as_it_is, Inside)]


@pytest.mark.parametrize(
    ("size", "way", "batches"),
    pairwise([1, 2, 3, 4], WAYS, [(7, 3), (8, 3), (19, 1)]),
    ids=lambda value: value[0].__name__ if value in WAYS else None,
)
def test_a_contrastive_loss_trains_as_on_one_device(ranks, size, way, batches):
    """The last batch of 8 holds three samples: with four devices, one has none."""
    (loss, model), (batch_size, steps) = way, batches
    run = kway.train(
        job_of(loss, batch_size, model), devices=f"cpu:{size}", epochs=1, ranks=ranks, echo=False
    )
    assert run.record.steps == steps
    weights, loss_value = plain(batch_size)
    assert run.epochs[0]["train_loss"] == pytest.approx(loss_value, rel=1e-12)
    for name, value in weights.items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("loss", "model"), [(every, Pair), (own, Pair), (as_it_is, Inside)], ids=lambda value: value.__name__
)
def test_the_proof_and_evaluation_see_all_samples_too(ranks, loss, model):
    job = job_of(loss, 8, model)
    proof = kway.prove(job, devices="1,2,3,4", ranks=ranks, echo=False)
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]
    data = {"left": LEFT[:11], "right": RIGHT[:11], "label": torch.zeros(11)}
    seen = [
        kway.train(
            job_of(loss, 8, model, validation=data), devices=f"cpu:{size}", epochs=1, ranks=ranks, echo=False
        )
        for size in (1, 2, 3)
    ]
    first, *others = [run.epochs[0]["validation_loss"] for run in seen]
    assert others == pytest.approx([first] * 2, rel=1e-12)


def gathered(context, x, parts, dtype):
    rank = context.world.rank
    start, count = sum(parts[:rank]), parts[rank]
    presence = Presence()
    presence.counts = count > 0
    own = (x[start : start + count] if count else x[:1] * 0 + 77).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        own.requires_grad_()
    with WholeBatch(Group(rank, context.world.size), presence).current():
        whole, place = all_samples(own, place=True)
    if own.requires_grad:
        slope = torch.arange(whole.numel()).view(whole.shape) * (rank + 1.0)
        whole.backward((slope * (1 - 2j) if dtype.is_complex else slope).to(dtype))
    return whole.detach(), place, own.grad


@pytest.mark.parametrize("parts", [[3, 2], [5, 0], [0, 5], [2, 2, 1], [1, 0, 4]])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex64, torch.bfloat16, torch.int64, torch.bool], ids=str
)
def test_rows_come_in_global_order_and_gradients_are_summed(ranks, parts, dtype):
    x = torch.arange(10.0).view(5, 2)
    size = len(parts)
    factor = sum(range(1, size + 1)) - sum(rank + 1 for rank in range(size) if not parts[rank])
    slope = x * factor * (1 - 2j if dtype.is_complex else 1)
    for rank, (whole, place, grad) in enumerate(ranks.run(gathered, x, parts, dtype, size=size)):
        assert torch.equal(whole, x.to(dtype))
        start = sum(parts[:rank])
        assert place == (slice(start, start + parts[rank]) if parts[rank] else slice(0, 1))
        if grad is not None:
            assert grad.dtype == dtype
            right = slope[start : start + parts[rank]] if parts[rank] else torch.zeros(1, 2)
            assert torch.equal(grad, right.to(dtype))


def mismatched(context):
    rank, size = context.world.rank, context.world.size
    with WholeBatch(Group(rank, size), Presence()).current():
        try:
            all_samples(torch.zeros(2, 3 + rank))
        except ValueError as error:
            return str(error)


def test_rows_of_different_shapes_are_an_error_on_all_ranks(ranks):
    for rank, said in enumerate(ranks.run(mismatched, size=2)):
        assert said.startswith(f"kway.all_samples: rank {rank} has rows of shape ({3 + rank},)")


def test_one_device_gets_its_tensor_itself():
    x = torch.ones(3, 2)
    with WholeBatch(Group(), Presence()).current():
        assert all_samples(x) is x
        assert all_samples(x, place=True)[1] == slice(0, 3)
        with pytest.raises(kway.UsageError, match="scalar"):
            all_samples(torch.ones(()))


def test_outside_of_a_step_it_says_so():
    with pytest.raises(kway.UsageError, match="outside of a step"):
        all_samples(torch.ones(2))
    kway.train(job_of(every, 19), devices="cpu:1", epochs=1)
    with pytest.raises(kway.UsageError, match="outside of a step"):
        kway.all_samples(torch.ones(2))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("more", "level", "said"),
    [
        ({"micro_batch": 2}, "loose", "micro-batches"),
        ({}, "bits", "exactness bits with 3 shards"),
    ],
)
def test_a_batch_that_is_cut_in_time_is_refused(ranks, size, more, level, said):
    with pytest.raises(kway.RefusedError, match=said):
        kway.train(
            job_of(every, 19, **more), devices=f"cpu:{size}", exactness=level, shards=3, epochs=1, ranks=ranks,
            echo=False,
        )  # fmt: skip


def test_the_proof_at_bits_refuses_it(ranks):
    with pytest.raises(kway.RefusedError, match="exactness bits"):
        kway.prove(job_of(every, 19), devices="1,2", exactness="bits", shards=3, ranks=ranks, echo=False)
