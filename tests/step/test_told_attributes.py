"""What a rank without samples is told of attributes: all that the others left in a module, or nothing."""

import pickle
import threading
from enum import Enum, Flag

import pytest
import torch
from tests.step.test_kept_attributes import Cached, Phase, job_of, trained
from torch import nn

from kway.step.kept_attributes import KeptAttributes
from kway.step.plain_attributes import GONE


def told_to_another(make, *given):
    """Run one model on a rank with samples; return it, and another one of a rank without them that is told."""
    busy, idle = make(), make()
    lines = []
    one, other = KeptAttributes("shard", lines), KeptAttributes("shard", [])
    one.begin([*busy.modules()])
    other.begin([*idle.modules()])
    busy(*given)
    one.end_of_piece()
    told = pickle.loads(pickle.dumps(one.told()))
    one.end_of_step()
    other.end_of_step(told)
    return busy, idle, lines


def test_a_rank_without_samples_takes_no_length_without_its_table():
    busy, idle, lines = told_to_another(Cached, torch.ones(5))
    assert (busy.length, idle.length, idle.table) == (5, 0, None)
    assert idle(torch.ones(5)).tolist() == busy(torch.ones(5)).tolist()
    assert len(lines) == 1
    assert "attributes of Cached stay as they were on a device without samples" in lines[0]


class Odd(Enum):
    """Its values can be sent to no other process."""

    ONE, TWO = threading.Lock(), threading.Lock()


class Rights(Flag):
    READ, WRITE = 1, 2


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.odd, self.rights, self.once = 0, Odd.ONE, Rights.READ, True

    def forward(self):
        self.n, self.odd, self.rights = self.n + 1, Odd.TWO, Rights.READ | Rights.WRITE
        del self.once


def test_a_rank_without_samples_is_told_of_enums_by_name_and_of_what_is_gone():
    _, idle, lines = told_to_another(Keeps)
    assert (idle.n, idle.odd, idle.rights) == (1, Odd.TWO, Rights.READ | Rights.WRITE)
    assert not hasattr(idle, "once")
    assert lines == []
    assert pickle.loads(pickle.dumps(GONE)) is GONE


class TakesUp(nn.Module):
    """Its enum is new with the first pass."""

    def __init__(self):
        super().__init__()
        self.n, self.phase = 0, None

    def forward(self):
        self.n, self.phase = self.n + 1, Phase.HOT


class TakesUpLate(TakesUp):
    def forward(self):
        super().forward()
        self.late = Phase.WARM


class AddsALayer(TakesUp):
    def forward(self):
        self.n, self.act = 1, nn.ReLU()


@pytest.mark.parametrize("make", [TakesUp, TakesUpLate, AddsALayer])
def test_a_rank_without_samples_takes_nothing_of_a_module_of_which_it_cannot_have_all(make):
    _, idle, lines = told_to_another(make)
    assert vars(idle).keys() == vars(make()).keys()
    assert (idle.n, idle.phase, len(lines)) == (0, None, 1)


class Act(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 0

    def forward(self, x):
        self.k += 1
        return x


class Late(nn.Module):
    """Adds a layer in its third pass: the step in which only the first of two ranks has samples."""

    def __init__(self):
        super().__init__()
        self.inner, self.n = nn.Linear(1, 1), 0
        nn.init.constant_(self.inner.weight, 0.5)
        nn.init.constant_(self.inner.bias, 0.5)

    def forward(self, x):
        self.n += 1
        if self.n == 3:
            self.act = Act()
        x = self.inner(x)
        return self.act(x) if hasattr(self, "act") else x


class Table(nn.Linear):
    """A table as long as the largest number so far, which comes where only the first of two ranks has samples."""

    def __init__(self):
        super().__init__(1, 1)
        self.length, self.table = 0, None
        nn.init.constant_(self.weight, 0.5)
        nn.init.constant_(self.bias, 0.5)

    def forward(self, x):
        needed = int(x.max()) + 1
        if needed > self.length:
            self.length, self.table = needed, torch.ones(needed, dtype=x.dtype) / 3
        return super().forward(x) * self.table[x.long()]


def test_what_only_one_rank_made_in_a_step_does_not_count(ranks):
    """A layer, of which the other one does not know, and a table with its length."""
    x = torch.tensor([0.0] * 8 + [5.0], dtype=torch.float64).unsqueeze(1)
    for model in (Late, Table):
        job = job_of(model, data=(x, x + 1), batch_size=4)
        runs = [trained(ranks, job, size, exactness="bits", shards=4) for size in (1, 2)]
        assert len({run.record.weights_sha256 for run in runs}) == 1, model
