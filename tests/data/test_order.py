import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from kway.data import device_order
from kway.data.order import KeyedOrder, bounds, check_batch_size, key, permute, split
from kway.data.permutation import Network
from kway.errors import UsageError


def permuted(n: int, seed: int) -> list[int]:
    return permute(np.arange(n), n, seed).tolist()


@pytest.mark.parametrize("seed", [0, 1])
def test_every_n_is_permuted_one_to_one(seed):
    for n in [*range(1, 301), 1000, 4097, 60000]:
        assert sorted(permuted(n, key(seed, n))) == list(range(n)), n


@pytest.mark.parametrize(("n", "keys"), [(3, 1500), (4, 2400), (5, 4800)])
def test_all_orders_appear_about_equally(n, keys):
    found = Counter(tuple(permuted(n, key("uniform", n, number))) for number in range(keys))
    expected = keys / math.factorial(n)
    chi_square = sum((found[p] - expected) ** 2 / expected for p in itertools.permutations(range(n)))
    freedom = math.factorial(n) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [100, 1000, 5000])
def test_epochs_are_not_correlated(n):
    orders = [np.asarray(permuted(n, key(0, "order", epoch))) for epoch in range(12)]
    limit = 5 / math.sqrt(n)
    for one, other in itertools.combinations([np.arange(n), *orders], 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < limit
    for order in orders:  # neighbours in the data set are not neighbours in the batch
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < limit


def test_places_are_uniform_in_a_large_set():
    n, cells = 3000, 10
    counts = np.zeros((cells, cells))
    for number in range(20):
        order = permute(np.arange(n), n, key("cells", number))
        np.add.at(counts, (np.arange(n) * cells // n, order * cells // n), 1)
    expected = 20 * n / cells**2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < (cells - 1) ** 2 + 5 * math.sqrt(2 * (cells - 1) ** 2)


@pytest.mark.parametrize("n", [1, 5, 255, 256, 300, 60000, 2**40 + 7])
def test_some_places_of_any_number(n):
    positions = np.unique(np.linspace(0, n - 1, 500).astype(np.int64))
    found = permute(positions, n, key(n))
    assert len(np.unique(found)) == len(positions)
    assert 0 <= found.min() <= found.max() < n


SIZES = [1, 5, 255, 256, 257, 300, 1000, 4097, 60000]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_a_device_gets_the_same_order(n, shuffle, monkeypatch):
    monkeypatch.setattr(device_order, "_CHUNK", 1 + n // 3)
    order = KeyedOrder(n, 4, 3, shuffle=shuffle)
    for epoch in range(3):
        found = device_order.order_on(torch.device("cpu"), order, epoch)
        assert found.dtype == torch.int64
        assert found.tolist() == order.at(epoch, np.arange(n)).tolist()


def test_positions_that_take_more_than_one_pass_are_all_found():
    network = Network.of(60000, 7)
    positions = np.arange(60000)
    once = network.forward(positions)
    late, ends = network.detours(network.tables())
    assert sorted(late.tolist()) == positions[once >= 60000].tolist() != []
    assert ends.tolist() == permute(late, 60000, 7).tolist()
    assert network.back(once, network.tables()).tolist() == positions.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", SIZES)
def test_a_gpu_gets_the_same_order_and_is_not_waited_for(n):
    order, device = KeyedOrder(n, 4, 3), torch.device("cuda:0")
    torch.cuda.set_sync_debug_mode("error" if n >= 256 else "default")
    try:
        found = device_order.order_on(device, order, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.tolist() == order.at(1, np.arange(n)).tolist()


def test_order_never_changes_between_versions():
    assert permuted(10, 0) == TEN
    assert permute(np.arange(4), 60000, 0).tolist() == FOUR


def test_a_batch_needs_no_memory_for_the_data_set():
    order = KeyedOrder(2**50, 256, seed=0)
    assert len(np.unique(order.batch(0, 2**41))) == 256


@pytest.mark.parametrize(("samples", "batch"), [(13, 4), (12, 4), (3, 8), (1, 1), (257, 256)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_sample_once(samples, batch, shuffle):
    order = KeyedOrder(samples, batch, seed=5, shuffle=shuffle)
    batches = [order.batch(2, step).tolist() for step in range(order.steps(2))]
    seen = [index for one in batches for index in one]
    assert sorted(seen) == list(range(samples))
    assert [len(one) for one in batches[:-1]] == [batch] * (len(batches) - 1)
    assert (seen == list(range(samples))) or shuffle


def test_three_epochs_have_three_orders_and_seeds_differ():
    orders = [
        tuple(KeyedOrder(8, 8, seed).batch(epoch, 0).tolist()) for seed in range(2) for epoch in range(3)
    ]
    assert len(set(orders)) == 6


def test_drop_last_leaves_out_the_partial_batch_only_when_asked():
    assert KeyedOrder(9, 5, 0).steps(0) == 2
    order = KeyedOrder(9, 5, 0, drop_last=True)
    assert order.steps(0) == 1
    assert len(order.batch(0, 0)) == 5


@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_past_the_end_is_refused(step):
    with pytest.raises(UsageError, match="4 steps"):
        KeyedOrder(13, 4, 0).batch(0, step)


def test_split_is_balanced():
    assert split(50, 8) == [7, 7, 6, 6, 6, 6, 6, 6]
    assert split(9, 4) == [3, 2, 2, 2]
    assert split(0, 3) == [0, 0, 0]
    assert split(1, 3) == [1, 0, 0]


def test_bounds_follow_split():
    for total, parts in itertools.product(range(20), range(1, 9)):
        sizes = split(total, parts)
        assert sum(sizes) == total
        assert max(sizes) - min(sizes) <= 1
        for part in range(parts):
            assert bounds(total, parts, part) == (sum(sizes[:part]), sum(sizes[: part + 1]))


@pytest.mark.parametrize("call", [lambda: split(3, 0), lambda: split(-1, 2), lambda: bounds(3, 2, 2)])
def test_impossible_splits_are_refused(call):
    with pytest.raises(UsageError):
        call()


@pytest.mark.parametrize("value", [0, -3, 2.5, "8", True, None])
def test_impossible_batch_sizes_are_named(value):
    with pytest.raises(UsageError, match=rf"{value}.*; give"):
        check_batch_size(value)


TEN = [1, 6, 4, 5, 7, 0, 2, 8, 9, 3]
FOUR = [9027, 4553, 34391, 2636]
