"""On GPUs: parts computed again on autograd's threads, sparse gradients, and gathers of the global batch."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import kway
from kway.data.order import KeyedOrder

pytestmark = pytest.mark.gpu

G = torch.Generator().manual_seed(0)
X = torch.randn(23, 6, generator=G)
TOKENS = torch.randint(0, 11, (23, 4), generator=G)
Y = torch.randn(23, 3, generator=G)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    def __init__(self, reentrant, *layers):
        super().__init__()
        self.reentrant, self.inner = reentrant, nn.Sequential(*layers)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def deep(reentrant):
    return nn.Sequential(
        nn.Linear(6, 8),
        Block(reentrant, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8)),
        Block(reentrant, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
    )


class Words(nn.Module):
    """A table and a bag with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(11, 3, mode="sum", sparse=True)

    def forward(self, tokens):
        return self.table(tokens).sum(1) * self.bag(tokens)


def job_of(model, data, **more):
    more = {"loss": nn.MSELoss(), "optimizer": MOMENTUM, "batch_size": 8, **more}
    return kway.Job(model=model, data=data, **more)


def prove(job, up_to_four, level):
    ranks, devices = up_to_four
    proof = kway.prove(
        job, devices=devices, exactness=level, shards=4, own_optimizer=True, ranks=ranks, echo=False
    )
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", ["math", "bits"])
def test_w17_what_is_computed_again_counts_once(up_to_four, reentrant, level):
    prove(job_of(partial(deep, reentrant), (X, Y), batch_size=12), up_to_four, level)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", ["math", "bits", "loose"])
def test_w17_statistics_move_once_on_one_gpu(one, reentrant, level):
    run = kway.train(
        job_of(partial(deep, reentrant), (X, Y), batch_size=23),
        devices=one,
        exactness=level,
        shards=2,
        epochs=1,
    )
    assert [int(m.num_batches_tracked) for m in run.model.modules() if isinstance(m, nn.BatchNorm1d)] == [
        1,
        1,
    ]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("level", ["math", "bits"])
def test_w32_sparse_gradients(up_to_four, level, clip):
    prove(job_of(Words, (TOKENS, Y), clip=clip), up_to_four, level)


@pytest.mark.parametrize("level", ["math", "bits"])
def test_w32_sparse_adam(up_to_four, level):
    optimizer = partial(torch.optim.SparseAdam, lr=0.1)
    prove(job_of(Words, (TOKENS, Y), optimizer=optimizer), up_to_four, level)


class Pair(nn.Module):
    """Two towers, compared over the global batch in a part that is computed again."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, left, right):
        return checkpoint(own_rows, self.left(left), self.right(right), use_reentrant=False)


def own_rows(left, right):
    (all_left, place), all_right = kway.all_samples(left, place=True), kway.all_samples(right)
    return contrasted(all_left, all_right)[place]


def contrasted(left, right):
    similar = 4 * normalize(left) @ normalize(right).T
    return cross_entropy(similar, torch.arange(len(similar), device=similar.device), reduction="none")


def as_it_is(output, _):
    return output


def by_hand(device):
    torch.manual_seed(0)
    model = Pair().double().to(device)
    optimizer = MOMENTUM(model.parameters())
    order = KeyedOrder(len(X), 8, 0)
    for step in range(order.steps(0)):
        rows = torch.from_numpy(order.batch(0, step))
        left, right = (part[rows].double().to(device) for part in (X, Y))
        optimizer.zero_grad()
        contrasted(model.left(left), model.right(right)).mean().backward()
        optimizer.step()
    return model.state_dict()


def test_a_loss_over_all_samples_inside_a_part_that_is_computed_again(up_to_four, one):
    ranks, devices = up_to_four
    weights = by_hand(one)
    data = {"left": X, "right": Y, "label": torch.zeros(23)}
    job = job_of(Pair, data, loss=as_it_is, precision="fp64")
    for device_set in devices.split():
        run = kway.train(job, devices=device_set, epochs=1, ranks=ranks, echo=False)
        for name, value in run.model.state_dict().items():
            torch.testing.assert_close(value.cpu(), weights[name].cpu(), rtol=0, atol=1e-11, msg=name)
