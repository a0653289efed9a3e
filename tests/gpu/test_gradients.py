"""On GPUs: parts computed again on autograd's threads, sparse gradients, and gathers of the global batch."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import kway
from kway.comm.group import Group
from kway.comm.reduce import GradientReducer
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


class Wide(nn.Module):
    """Gradients of a megabyte, of a layer and of tables that are added up as views, and small ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 512)
        self.one, self.other = (nn.Parameter(0.04 * torch.randn(512, 512)) for _ in range(2))
        self.middle, self.last = nn.Linear(512, 512), nn.Linear(512, 3)

    def forward(self, x):
        x = self.first(x) @ (self.one.unsqueeze(0) + self.other.unsqueeze(0))[0]
        return self.last(torch.tanh(self.middle(torch.tanh(x))))


class Rare(Wide):
    """Has one more table, which few samples need: ranks without such samples have no gradient for it."""

    def __init__(self):
        super().__init__()
        self.rare = nn.Parameter(0.04 * torch.randn(512, 512))

    def forward(self, x):
        out, rows = super().forward(x), (x[:, 0] > 1).nonzero().squeeze(1)
        if not len(rows):
            return out
        return out.index_add(0, rows, (self.first(x[rows]) @ self.rare)[:, :3])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bucket_mib", [1.5, 100])
@pytest.mark.parametrize("kind", ["eager", "graph", "compiled-graph"])
def test_large_gradients_are_reduced_where_they_lie(up_to_four, kind, bucket_mib):
    ranks, devices = up_to_four
    proof = kway.prove(
        job_of(Wide, (X, Y), batch_size=8, clip=0.05),
        devices=devices,
        step_kind=kind,
        settings={"bucket_mib": bucket_mib},
        ranks=ranks,
        echo=False,
    )
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]
    assert proof.step_kind == kind, proof.notices


def test_large_gradients_that_some_ranks_do_not_have(up_to_four):
    prove(job_of(Rare, (X, Y), batch_size=3), up_to_four, "math")


def where_gradients_lie(context):
    """Return which gradients of the last of some steps were still where backward had left them."""
    device = torch.device(context.world.device)
    torch.manual_seed(0)
    model, group = Wide().to(device), Group(context.world.rank, context.world.size)
    reducer = GradientReducer(list(model.parameters()), group, 1)
    for _ in range(3):
        model.zero_grad()
        with reducer.sending():
            model(X.to(device)).square().mean().backward()
        before = [None if p.grad is None else p.grad.data_ptr() for p in model.parameters()]
        reducer.reduce(torch.zeros(1, device=device), True)
        reducer.divide_(torch.tensor(float(context.world.size), device=device))
    after = [0 if p.grad is None else p.grad.data_ptr() for p in model.parameters()]
    return {name for (name, _), a, b in zip(model.named_parameters(), before, after, strict=True) if a == b}


def test_only_gradients_that_share_memory_are_copied(up_to_four):
    ranks, devices = up_to_four
    found = ranks.run(where_gradients_lie, size=len(devices.split()[-1].split(",")))
    assert all(names == {"middle.weight"} for names in found), found
