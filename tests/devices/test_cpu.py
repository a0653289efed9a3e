import os

import pytest

from kway.devices import cpu
from kway.devices.cgroup import cpu_quota, memory_limit
from kway.errors import UsageError

GIB = 1 << 30


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(cpu, "affinity", lambda: 8)


V2 = {
    "proc/self/cgroup": "0::/box/inner\n",
    "sys/fs/cgroup/box/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/box/inner/cpu.max": "max 100000\n",
    "sys/fs/cgroup/box/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/box/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    "sys/fs/cgroup/box/inner/memory.max": "max\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/gone/box\n1:name=systemd:/\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


def test_quota_of_any_group_on_the_way_up(tmp_path, many):
    root = plant(tmp_path, V2)
    assert cpu_quota(root) == 2.5
    assert cpu.usable_cores(root) == 2
    assert memory_limit(root) == (4 * GIB, 2 * GIB)


def test_version_one(tmp_path, many):
    root = plant(tmp_path, V1)
    assert cpu_quota(root) == 1.5
    assert cpu.usable_cores(root) == 1
    assert memory_limit(root) == (2 * GIB, GIB)


def test_quota_above_the_affinity_does_not_add_cores(tmp_path, many):
    root = plant(tmp_path, {**V2, "sys/fs/cgroup/box/cpu.max": "6400000 100000\n"})
    assert cpu.usable_cores(root) == 8


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"proc/self/cgroup": "3:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"},
        {"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/cpu.max": "rubbish\n"},
    ],
)
def test_no_limit(tmp_path, many, files):
    root = plant(tmp_path, files)
    assert cpu_quota(root) is None
    assert memory_limit(root) is None
    assert cpu.usable_cores(root) == 8


def test_tiny_quota_leaves_one_core(tmp_path, many):
    root = plant(tmp_path, {**V2, "sys/fs/cgroup/box/cpu.max": "10000 100000\n"})
    assert cpu.usable_cores(root) == 1


@pytest.mark.parametrize(("ranks", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_threads_share_the_cores(monkeypatch, ranks, threads):
    monkeypatch.setattr(cpu, "usable_cores", lambda: 8)
    assert cpu.threads_for(ranks, {}) == threads


@pytest.mark.parametrize(("value", "threads"), [("1", 1), ("3", 3), (" 5 ", 5), ("2,4", 2)])
def test_omp_num_threads_wins(monkeypatch, value, threads):
    monkeypatch.setattr(cpu, "usable_cores", lambda: 8)
    assert cpu.threads_for(2, {"OMP_NUM_THREADS": value}) == threads


@pytest.mark.parametrize("value", ["", "0", "-2", "many", "1.5", "²"])
def test_a_senseless_omp_num_threads_does_not(monkeypatch, value):
    monkeypatch.setattr(cpu, "usable_cores", lambda: 8)
    assert cpu.threads_for(2, {"OMP_NUM_THREADS": value}) == 4


def test_no_ranks_is_an_error():
    with pytest.raises(UsageError, match="0 ranks"):
        cpu.threads_for(0)


def test_describe_a_planted_machine(tmp_path, many):
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = plant(
        tmp_path,
        {
            **V2,
            "proc/cpuinfo": "processor : 0\nmodel name\t: Big Iron 9\n",
            "proc/meminfo": "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB\n",
            **{topology.format(i): f"{i % 2},{i % 2 + 2}\n" for i in range(4)},
        },
    )
    found = cpu.describe(root)
    assert found["model"] == "Big Iron 9"
    assert found["cores"] == 2
    assert (found["affinity"], found["quota"], found["usable"]) == (8, 2.5, 2)
    assert (found["memory_total"], found["memory_available"]) == (4 * GIB, GIB)


def test_a_system_without_proc_still_answers(tmp_path):
    found = cpu.describe(tmp_path)
    assert found["model"] == os.uname().machine
    assert found["cores"] == os.cpu_count()
    assert found["memory_total"] >= found["memory_available"] > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity mask")
def test_affinity_is_respected():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu.affinity() == 1
        assert cpu.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert cpu.affinity() == len(before)


def test_freed_memory_is_kept_where_the_c_library_can():
    import platform

    from kway.devices.cpu import keep_freed_memory

    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_few_threads_beside_a_gpu():
    from kway.devices.cpu import MOST_BESIDE_A_GPU, threads_for, usable_cores

    assert threads_for(1, {}, beside_gpu=True) == min(MOST_BESIDE_A_GPU, usable_cores())
    assert threads_for(1, {"OMP_NUM_THREADS": "7"}, beside_gpu=True) == 7
