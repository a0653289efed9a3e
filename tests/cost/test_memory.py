import pytest
from tests.workloads import workload

from kway.cost.memory import gradients_at_peak, memory_of

SHARES = (32, 64, 128)


def test_every_part_is_what_was_measured():
    parts = memory_of(workload(SHARES), "eager", 64)
    assert parts == {
        "weights": 4_000,
        # All of them are there when the activations, which are more, have gone.
        "gradients": 0,
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
    assert memory_of(known, "compiled", 64)["allocator"] == 0


def test_recomputing_keeps_less():
    assert memory_of(workload(SHARES), "eager", 64, recompute=True)["activations"] == 500 + 800 * 64
    bare = workload(SHARES)
    bare.memory["checkpointed_activation_bytes_per_sample"] = None
    assert memory_of(bare, "eager", 64, recompute=True)["activations"] == 500 + 2_000 * 64


@pytest.mark.parametrize(
    ("activations", "flat", "copies", "held"),
    [
        (10_000, 0, 1, 0),
        (10_000, 4_000, 1, 4_000),
        (1_000, 0, 1, 3_000),
        (1_000, 4_000, 1, 4_000 + 3_000),
        (1_000, 4_000, 2, 4_000 + 7_000),
    ],
)
def test_gradients_and_activations_are_never_all_there_at_once(activations, flat, copies, held):
    assert gradients_at_peak(4_000, activations, flat, copies) == held


def with_peaks(*rows, workspace=0, **more):
    peak = [
        {"step_kind": "eager", "devices": devices, "samples": samples, "bytes": size}
        for devices, samples, size in rows
    ]
    known = workload(SHARES)
    return workload(SHARES, memory={**known.memory, "peak": peak, "workspace_bytes": workspace}, **more)


def total(known, samples, several=False):
    return sum(memory_of(known, "eager", samples, several=several).values())


def test_what_was_measured_is_what_is_predicted_alone_and_as_one_of_several():
    # As one of two the same share takes more: the vectors of the gradients, and 700 bytes that have no name.
    named = 8_080 + 500 + 2_000 * 64
    known = with_peaks((1, 64, named + 900), (2, 64, named + 4_096 + 700), (2, 32, 90_000), workspace=900)
    assert total(known, 64) == named + 900
    assert total(known, 64, several=True) == named + 4_096 + 700
    assert total(known, 32, several=True) == 90_000
    assert memory_of(known, "eager", 64, several=True)["workspace"] == 796
    assert memory_of(known, "eager", 64, several=True)["gradients"] == 4_000


def test_the_vectors_are_as_large_as_what_travels_in_them():
    counted = with_peaks(buckets=[3_000, 1_100])
    assert memory_of(counted, "eager", 64, several=True)["gradients"] == 4_100
    # At level bits slices travel.
    ordered = with_peaks(buckets=[500, 550], level="bits")
    assert memory_of(ordered, "eager", 64, several=True)["gradients"] == 4_000


def test_on_gpus_only_small_gradients_lie_in_vectors():
    """The peak of a later step has 300 bytes of vectors in it, and 700 that have no name."""
    named = 8_080 + 500 + 2_000 * 64
    held = {**with_peaks((2, 64, named + 300 + 700)).memory, "vector_bytes": 300}
    one_bucket = workload(SHARES, memory={**held, "first_copies_bytes": 0}, buckets=[4_096])
    assert memory_of(one_bucket, "eager", 64, several=True)["gradients"] == 300
    assert total(one_bucket, 64, several=True) == named + 300 + 700
    # The first steps of several buckets copy the large ones, and have to fit as well.
    buckets = workload(SHARES, memory={**held, "first_copies_bytes": 3_800}, buckets=[3_000, 1_100])
    assert memory_of(buckets, "eager", 64, several=True)["gradients"] == 4_100
    assert total(buckets, 64, several=True) == named + 300 + 700 + 3_800


def test_a_recorded_step_takes_what_was_seen_of_its_kind_and_else_what_those_before_it_take():
    """Compiled ones keep less than autograd does of eager ones, which are no part of them."""
    named = 8_080 + 500 + 2_000 * 64
    beyond = {"eager": 900, "compiled": -60_000, "compiled-graph": -50_000}
    known = workload(SHARES)

    def found(kind, *seen):
        known.memory["peak"] = [
            {"step_kind": of, "devices": 1, "samples": 64, "bytes": named + beyond[of]} for of in seen
        ]
        return sum(memory_of(known, kind, 64).values()) - named

    assert found("compiled-graph", "eager", "compiled", "compiled-graph") == -50_000
    assert found("compiled-graph", "eager", "compiled") == -60_000
    assert found("compiled-graph", "eager") == 900
    assert found("graph", "eager", "compiled") == 900
    found("compiled", "compiled")
    assert sum(memory_of(known, "compiled", 16).values()) == 8_080 + 500 + 2_000 * 16 - 60_000 / 4


def test_without_peaks_of_several_what_one_alone_has_beyond_its_parts_counts():
    known = with_peaks((1, 64, 8_080 + 500 + 2_000 * 64 + 900))
    assert total(known, 64, several=True) == total(known, 64) + 4_000
    assert memory_of(with_peaks(workspace=70), "eager", 64)["workspace"] == 70


@pytest.mark.parametrize("recompute", [False, True])
def test_more_samples_never_take_less(recompute):
    sizes = [
        sum(memory_of(workload(SHARES), "eager", samples, recompute).values()) for samples in range(1, 300, 7)
    ]
    assert sizes == sorted(sizes)
