"""How the processors of a machine are cut into parts."""

import os

import pytest

from kway.devices.cpu_parts import parts


@pytest.fixture
def two_threads_a_core(tmp_path):
    """Eight processors: 0 and 4 are one core, 1 and 5, ..."""
    for processor in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
    return tmp_path


def test_a_core_is_not_shared_by_two_parts(two_threads_a_core):
    assert parts(2, range(8), two_threads_a_core) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert parts(3, range(8), two_threads_a_core) == [[0, 4], [1, 5], [2, 6, 3, 7]]


def test_more_parts_than_cores_share_cores_but_no_processors(two_threads_a_core):
    found = parts(8, range(8), two_threads_a_core)
    assert sorted(found) == [[processor] for processor in range(8)]


def test_more_parts_than_processors_are_the_same_ones(tmp_path):
    assert parts(5, [3, 7], tmp_path) == [[3], [7], [3], [7], [3]]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity mask")
@pytest.mark.parametrize("count", [1, 2])
def test_all_processors_of_this_process_are_used(count):
    used = {processor for part in parts(count) for processor in part}
    assert used == os.sched_getaffinity(0) or len(used) == count
