import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from kway.data.samplers import BatchSamplerOrder, SamplerOrder
from kway.errors import DataError, UsageError


class Stateful:
    """Draws from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self):
        self.own = random.Random(0)

    def __iter__(self):
        return iter(self.own.sample(range(10), 10))


class ByEpoch:
    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 3)


class Everywhere:
    """Draws from all global generators."""

    def __iter__(self):
        return iter([int(torch.randint(10, ())), np.random.randint(10), random.randrange(10)] * 3)


def whole(order, epoch):
    return [i for step in range(order.steps(epoch)) for i in order.batch(epoch, step).tolist()]


def order_of(sampler, **more):
    return SamplerOrder(sampler, samples=10, batch_size=4, seed=3, **more)


@pytest.mark.parametrize(
    "make",
    [
        Stateful,
        ByEpoch,
        Everywhere,
        lambda: RandomSampler(range(10), replacement=True, num_samples=17),
        lambda: WeightedRandomSampler([1.0] * 10, 9, generator=torch.Generator()),
    ],
)
def test_every_process_and_a_resumed_run_see_the_same(make):
    straight, resumed = order_of(make()), order_of(make())
    epochs = [whole(straight, epoch) for epoch in range(4)]
    torch.rand(5), np.random.rand(3), random.random()  # what the processes drew before does not enter
    assert whole(resumed, 3) == epochs[3]
    assert whole(resumed, 1) == epochs[1]
    assert len(set(map(tuple, epochs))) == 4


def test_set_epoch_is_called():
    assert whole(order_of(ByEpoch()), 2) == [2, 2, 2]


def test_random_state_and_sampler_are_left_as_they_were():
    sampler = WeightedRandomSampler([1.0] * 10, 9, generator=torch.Generator())
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    own = sampler.generator.get_state()
    whole(order_of(sampler), 1), whole(order_of(Everywhere()), 1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    assert torch.equal(own, sampler.generator.get_state())


def test_the_data_set_is_not_copied():
    class Large(list):
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    data = Large(range(10))
    order = order_of(RandomSampler(data, replacement=True), data=data)
    assert len(whole(order, 0)) == 10


def test_the_last_batch_is_partial_unless_drop_last():
    assert [len(order_of(range(10)).batch(0, step)) for step in range(3)] == [4, 4, 2]
    assert order_of(range(10), drop_last=True).steps(0) == 2


def test_negative_indices_count_from_the_end():
    assert whole(order_of([-1, 0]), 0) == [9, 0]


@pytest.mark.parametrize("items", [[10], [-11], [0.5], ["a"]])
def test_indices_that_are_none_are_named(items):
    with pytest.raises(DataError, match=str(items[0])):
        order_of(items).batch(0, 0)


def test_a_step_past_the_end_is_refused():
    with pytest.raises(UsageError, match="3 steps"):
        order_of(range(10)).batch(0, 3)


def test_batches_stay_whole():
    order = BatchSamplerOrder([[0, 1, 2], [3], [4, 5]], samples=6, seed=0)
    assert [order.batch(0, step).tolist() for step in range(order.steps(0))] == [[0, 1, 2], [3], [4, 5]]
    assert order.batch_size == 3
    with pytest.raises(DataError, match="at least one index"):
        BatchSamplerOrder([[]], samples=6, seed=0).batch(0, 0)


class Once:
    """Gives batches that can be read once, and only before the next one."""

    def __iter__(self):
        for _, batch in itertools.groupby(range(6), key=lambda index: index // 3):
            yield batch


def test_batches_that_can_be_read_once_are_read_once():
    order = BatchSamplerOrder(Once(), samples=6, seed=0)
    assert order.digest(0) == BatchSamplerOrder([[0, 1, 2], [3, 4, 5]], samples=6, seed=0).digest(0)
    assert order.batch_size == 3
    for _ in range(2):
        assert [order.batch(0, step).tolist() for step in range(2)] == [[0, 1, 2], [3, 4, 5]]
