import pytest
from tests.workloads import workload

from kway.cost.memory import memory_of

SHARES = (32, 64, 128)


def test_every_part_is_what_was_measured():
    parts = memory_of(workload(SHARES), "eager", 64)
    assert parts == {
        "weights": 4_000,
        "gradients": 4_000,
        "optimizer": 4_000,
        "buffers": 80,
        "activations": 500 + 2_000 * 64,
        "workspace": 0,
        "allocator": 0,
    }


def test_what_the_allocator_has_beyond_is_its_margin():
    known = workload(SHARES)
    for peak in known.memory["peak"]:
        peak["bytes"] += 10 * peak["samples"]
    assert memory_of(known, "eager", 64)["allocator"] == 640
    assert memory_of(known, "eager", 96)["allocator"] == 960
    assert memory_of(known, "eager", 48)["allocator"] == pytest.approx(480)
    # Beyond what was measured that of the nearest share: one sample more never takes less.
    assert memory_of(known, "eager", 1_000)["allocator"] == 10 * max(SHARES)
    assert memory_of(known, "eager", 1)["allocator"] == 10 * min(SHARES)
    assert memory_of(known, "graph", 64)["allocator"] == 0


def test_recomputing_keeps_less():
    assert memory_of(workload(SHARES), "eager", 64, recompute=True)["activations"] == 500 + 800 * 64
    bare = workload(SHARES)
    bare.memory["checkpointed_activation_bytes_per_sample"] = None
    assert memory_of(bare, "eager", 64, recompute=True)["activations"] == 500 + 2_000 * 64


@pytest.mark.parametrize("recompute", [False, True])
def test_more_samples_never_take_less(recompute):
    sizes = [
        sum(memory_of(workload(SHARES), "eager", samples, recompute).values()) for samples in range(1, 300, 7)
    ]
    assert sizes == sorted(sizes)
