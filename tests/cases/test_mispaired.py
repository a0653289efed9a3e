"""Ranks that call other collectives than each other: an error, never numbers."""

import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import kway
from kway.comm.flat import FlatGradients
from kway.comm.trace import Trace
from kway.step.telling import Telling
from kway.strategies.engine import Engine
from kway.training.parts import training_parts


class Extra(nn.Module):
    """In its third training step sums something of its own, on one rank only."""

    def __init__(self, numel):
        super().__init__()
        self.layer, self.norm, self.numel, self.step = nn.Linear(6, 4), nn.BatchNorm1d(4), numel, 0

    def forward(self, x):
        if self.training:
            self.step += 1
            if self.step == 3 and os.environ.get("RANK") == "1":
                dist.all_reduce(torch.ones(self.numel))
        return self.norm(self.layer(x))


def job(numel):
    draw = torch.Generator().manual_seed(1)
    return kway.Job(
        model=partial(Extra, numel),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.rand(80, 6, generator=draw), torch.randint(4, (80,), generator=draw)),
        batch_size=10,
    )


@pytest.mark.timeout(60)
def test_a_sum_that_one_rank_calls_by_itself_is_found_before_the_optimizer_acts(trained):
    # At level loose the next collective of the other rank is the sum of the gradients. Of equal length, the back end
    # pairs the two without a word.
    as_long = len(FlatGradients(list(Extra(1).parameters()), 4 * 2).vectors[0])
    with pytest.raises(kway.MispairedError, match=r"do not fit together|other collectives"):
        trained(job(as_long), 2, exactness="loose")


@pytest.mark.parametrize("also", [False, True], ids=["left out", "taken twice"])
@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_steps_over_other_batches_are_no_numbers_of_two_batches(ranks, exactness, also):
    given = job(1)
    with pytest.raises(kway.MispairedError, match=r"another batch|batches"):
        ranks.run(partial(in_level, exactness), replace(given, model=partial(nn.Linear, 6, 4)), also)


def in_level(exactness, context, given, also):
    with kway.parallel(given, strategy="data", exactness=exactness, shards=2) as p:
        for batch in p.batches(0):
            if p.rank == 1 and batch.step == 2 and not also:
                continue
            p.step(batch)
            if p.rank == 1 and batch.step == 2 and also:
                p.step(batch)


class Grows(nn.Module):
    """Trades two layers, in a training step that one rank may have no samples for."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        if self.training and len(x) < 2:
            self.a, self.b = self.b, self.a
        return self.last(self.b(self.a(x)))


def test_layers_that_change_places_on_one_rank_alone_are_found(trained):
    few = job(1)
    given = replace(few, model=Grows, data=tuple(part[:21] for part in few.data), shuffle=False)
    with pytest.raises(kway.MispairedError, match=r"same parameters|do not fit together|other collectives"):
        trained(given, 2, exactness="bits", shards=2, epochs=2)


class Domains(nn.Module):
    """Three layers of one width; each sample names the one that normalises it."""

    def __init__(self):
        super().__init__()
        self.norms, self.last = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(3)), nn.Linear(6, 4)

    def forward(self, x, domain):
        out = torch.zeros_like(x)
        for k in domain.unique().tolist():
            of = (domain == k).nonzero()[:, 0]
            out = out.index_copy(0, of, self.norms[k](x[of]))
        return self.last(out)


@pytest.mark.parametrize("strategy", ["data", "threads"])
def test_layers_of_one_width_are_told_apart(trained, strategy):
    x, y = job(1).data
    domain = torch.tensor([0, 1] * 2 + [0, 2] * 2).repeat(10)
    given = replace(job(1), model=Domains, data=(x, domain, y), batch_size=8, shuffle=False)
    with pytest.raises(kway.MispairedError, match=r"other collectives|do not fit together"):
        trained(given, 2, strategy=strategy)


def test_the_fingerprint_knows_order_shape_and_dtype():
    def of(*calls):
        trace = Trace()
        for call in calls:
            trace.note(*call)
        return trace.take()

    a, b = ("sum", (3,), torch.float32), ("stack", (3,), torch.float32)
    assert of(a, b) == of(a, b)
    others = [
        of(b, a),
        of(a),
        of(a, b, b),
        of(a, ("stack", (4,), torch.float32)),
        of(a, ("stack", (3,), torch.float64)),
    ]
    assert len({of(a, b), *others}) == 6
    assert all(0 < value < 2**16 for value in (of(), of(a), *others))


def test_what_comes_once_does_not_keep_the_trace_from_knowing_what_comes_again():
    class Dtype:
        written = 0

        def __str__(self):
            self.written += 1
            return "float32"

    trace, dtype = Trace(), Dtype()
    for step in range(20_000):
        trace.note("batch", (0, step, step))
    for _ in range(3):
        trace.note("sum", (3,), dtype)
    assert dtype.written == 1


def test_taking_the_fingerprint_starts_anew():
    trace = Trace()
    empty = trace.take()
    trace.note("sum")
    assert trace.take() != empty
    assert trace.take() == empty


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_where_steps_tell_seldom_what_differed_in_one_shows_in_every_later_one(ranks, exactness):
    assert ranks.run(seldom, job(1), exactness) == [[("told", 4)], [("told", 4)]]
    assert ranks.run(seldom, job(1), exactness, 2) == [[("asked", 2)], [("asked", 2)]]
    assert ranks.run(seldom, job(1), exactness, 2, False) == [[("asked", 0)], [("asked", 0)]]
    assert ranks.run(seldom, job(1), exactness, None, True, 3) == [[("told", 3)], [("told", 3)]]


def seldom(context, given, exactness, asks_after=None, differs=True, tells_in=None):
    """What ranks of which one calls something else in its second step are told, and after how many steps."""
    found, now = [], [0]
    with told_seldom(context, given, exactness, lambda: now[0] == tells_in) as (engine, shares):
        for steps, share in enumerate(shares, 1):
            now[0] = steps
            if differs and steps == 2:
                engine.part.batch_group.trace.note("by itself" if context.world.rank else "")
            try:
                engine.step(share, steps - 1)
            except kway.MispairedError:
                return [*found, ("told", steps)]
            if steps == asks_after:
                return [("asked", steps if differ(engine) else 0)]
    return found


@contextmanager
def told_seldom(context, given, exactness, also):
    """An engine of which one step in four tells, and ``also``; with its shares of an epoch."""
    given = replace(given, model=nn.Linear(6, 4))
    parts, _ = training_parts(given)
    telling = Telling(4, also)
    engine = Engine(given, given.model, {"data": 2}, context.world, exactness, 10, 2, telling=telling)
    loader = engine.loader(parts)
    try:
        yield engine, loader.epoch(0)
    finally:
        engine.close()
        loader.close()


def differ(engine, again=False):
    try:
        engine.compare(again)
    except kway.MispairedError:
        return True
    return False


def test_what_a_step_told_is_compared_again_only_where_that_is_asked_for(ranks):
    assert ranks.run(compared_again, job(1)) == [[False, False, True]] * 2


def compared_again(context, given):
    with told_seldom(context, given, "math", lambda: True) as (engine, shares):
        engine.step(next(iter(shares)), 0)
        before = engine.compare(True)
        # Stands for a step that has told, on a device that is not read yet.
        engine.part.batch_group.trace.note("by itself" if context.world.rank else "")
        return [bool(before), differ(engine), differ(engine, again=True)]
