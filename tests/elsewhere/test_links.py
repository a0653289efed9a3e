"""Times of collectives on a machine of round numbers, by hand."""

from dataclasses import replace

import pytest

from kway.elsewhere.description import described
from kway.elsewhere.links import counts, link_limit, ranks_within, seconds
from kway.measuring.collectives import ALL_REDUCE, COLLECTIVES, ORDERED, POINT_TO_POINT, bus_factor

US = 1e-6
GIB = 1 << 30


def machine(nodes=1, **software):
    """4 GPUs a node, 100 GB/s between them and 10 GB/s over the network for each, all of it reached."""
    base = described("64x8xh100")
    return replace(
        base, nodes=nodes, gpus=4,
        gpu={**base.gpu, "memory_bandwidth": 1e12},
        peer={"over": "nvlink", "bandwidth": 100e9, "hop_s": 1 * US, "long_hop_s": 5 * US},
        network={"bandwidth": 10e9, "hop_s": 3 * US, "long_hop_s": 20 * US, "tree_hop_s": 6 * US},
        software={**base.software, "launch_s": 4 * US, "call_s": 2 * US, "begin_s": 7 * US, "long_begin_s": 9 * US,
                  "short_share": 0.5, **software},
        reached={**base.reached, "memory": 1.0, "peer": 1.0, "network": 1.0},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("collective", "steps", "part"),
    [
        (ALL_REDUCE, 6, 1.5),
        ("all-gather", 3, 0.75),
        ("reduce-scatter", 3, 0.75),
        ("all-to-all", 1, 0.75),
        ("broadcast", 3, 1.0),
        (POINT_TO_POINT, 1, 1.0),
    ],
)
def test_one_node(collective, steps, part):
    here = machine()
    # A message of 4 floats: latency is all there is, but for its bytes at half the bandwidth.
    assert seconds(here, collective, 4, 16) == pytest.approx((7 + steps) * US + part * 16 / 50e9)
    assert seconds(here, collective, 4, GIB) == pytest.approx((9 + 5 * steps) * US + part * GIB / 100e9)
    # What is left beside the latency is nccl-tests' bus bandwidth.
    alone = GIB / (seconds(here, collective, 4, GIB) - (9 + 5 * steps) * US)
    assert alone * bus_factor(collective, 4) == pytest.approx(100e9)


def test_the_host_takes_its_time_to_begin():
    assert seconds(machine(call_s=50 * US), ALL_REDUCE, 4, 16) == pytest.approx(50 * US)


def test_several_nodes_go_by_the_slower_link():
    there = machine(nodes=8)
    # A quarter goes over each card, twice 7/8 of it: 0.4375 of the size at 10 GB/s, against 1.5 at 100 GB/s.
    ring = (9 + 6 * 5 + 14 * 20) * US + 0.4375 * GIB / 10e9
    tree = (9 + 6 * 5 + 6 * 20) * US + 0.5 * GIB / 10e9
    assert seconds(there, ALL_REDUCE, 32, GIB) == pytest.approx(min(ring, tree))
    assert ring < tree
    # Short messages take the tree: 2 log2(8) steps.
    short = (7 + 6 * 1 + 6 * 6) * US + 2 / 4 * 128 / 5e9
    assert seconds(there, ALL_REDUCE, 32, 128) == pytest.approx(short)
    assert seconds(there, "all-gather", 32, GIB) == pytest.approx(
        (9 + 3 * 5 + 7 * 20) * US + 7 / 8 / 4 * GIB / 10e9
    )
    assert seconds(there, "all-to-all", 32, GIB) == pytest.approx((9 + 5 + 20) * US + 7 / 8 * GIB / 10e9)
    assert seconds(there, POINT_TO_POINT, 8, GIB) == pytest.approx((9 + 5 + 20) * US + GIB / 10e9)
    # A part of one node needs no network.
    assert seconds(there, ALL_REDUCE, 4, GIB) == seconds(machine(), ALL_REDUCE, 4, GIB)


def test_a_fast_network_leaves_the_link_between_gpus_the_slower_one():
    there = machine(nodes=2)
    there = replace(there, network={**there.network, "bandwidth": 1e12})
    assert seconds(there, ALL_REDUCE, 8, GIB) == pytest.approx((9 + 6 * 5 + 2 * 20) * US + 1.5 * GIB / 100e9)


def test_the_sum_in_one_order():
    here = machine()
    sent = seconds(here, "all-to-all", 4, GIB) + seconds(here, "all-gather", 4, GIB)
    assert seconds(here, ORDERED, 4, GIB) == pytest.approx(sent + (2 + 3 * 3 / 4) * GIB / 1e12)
    small = seconds(here, "all-to-all", 4, 16) + seconds(here, "all-gather", 4, 16)
    assert seconds(here, ORDERED, 4, 16) == pytest.approx(small + 5 * 4 * US)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", ["8xh100", "8xa100", "64x8xh100"])
def test_more_bytes_never_cost_less(name, collective):
    there = described(name)
    for ranks in counts(there):
        times = [seconds(there, collective, ranks, 1 << k) for k in range(2, 33)]
        assert times == sorted(times)
        assert times[0] > 0


def test_which_numbers_of_ranks():
    assert counts(machine()) == [2, 3, 4]
    assert counts(machine(nodes=6)) == [2, 3, 4, 8, 16, 24]
    assert counts(described("64x8xh100")) == [2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512]
    assert ranks_within(machine(nodes=6), 12) == (4, 3)
    for ranks in (6, 28):
        with pytest.raises(ValueError, match=f"{ranks} ranks on 6 nodes of 4 GPUs"):
            ranks_within(machine(nodes=6), ranks)


def test_what_the_links_carry():
    assert link_limit(machine(nodes=2), 3) == 100e9
    assert link_limit(machine(nodes=2), 8) == 40e9
