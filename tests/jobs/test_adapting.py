"""What is said of a run that nobody can adapt to its memory, or not in the way that was tried."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.data.order import KeyedOrder
from kway.jobs.adapting import adapting_of
from kway.jobs.place import place


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (
            "math",
            "choose a smaller batch before the start (batch_size or --batch-size), which is another run, ",
        ),
        ("loose", "choose before the start what fits (micro_batch or --micro-batch), "),
        ("bits", "choose more shards before the start (shards or --shards), "),
    ],
)
def test_what_cannot_be_adapted_is_told_what_can_be_chosen_at_its_level(level, said):
    job = kway.Job(
        partial(nn.Linear, 3, 3), nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), None, batch_size=16
    )
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(kway.RefusedError) as caught:
        adapting_of("adapt", job, model, place("cpu:1", exactness=level), KeyedOrder(64, 16, seed=0))
    assert f"{said}more devices, or leave on_oom out" in str(caught.value)


class Appending(nn.Module):
    """Appends to a list what it makes, so that it cannot be computed again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x, kept):
        kept.append(self.layers(x))
        return x * torch.cat(kept)


class Keeping(nn.Module):
    """Has no room for what its blocks keep; a batch must not be cut for them."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Appending() for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            x = part(x, [])
        if "forward" not in vars(self.parts[0]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x


@pytest.mark.parametrize("size", [1, 2])
def test_where_blocks_cannot_be_computed_again_the_error_says_that_it_was_tried(ranks, size):
    sgd = partial(torch.optim.SGD, lr=0.1)
    job = kway.Job(Keeping, nn.MSELoss(), sgd, (torch.randn(8, 3), torch.randn(8, 3)), batch_size=8)
    with pytest.raises(kway.OutOfMemoryError) as caught:
        kway.train(job, devices=f"cpu:{size}", on_oom="adapt", steps=1, ranks=ranks.of(size))
    assert "tried recompute=true (activation checkpointing of 2 blocks), which is refused: " in str(
        caught.value
    )
    assert "Keeping whose blocks cannot be computed again" in str(caught.value)
