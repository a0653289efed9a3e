from tests.devices.system_tree import planted

from kway.devices import mps
from kway.devices.cpu_attributes import SYSCTL, read

CPUS = "sys/devices/system/cpu"
# Two sockets of one core with two threads each.
SERVER = {
    **{f"{CPUS}/cpu{i}/topology/physical_package_id": i % 2 for i in range(4)},
    **{f"{CPUS}/cpu{i}/topology/thread_siblings_list": "0,2" if i % 2 == 0 else "1,3" for i in range(4)},
    f"{CPUS}/cpu0/cpufreq/cpuinfo_max_freq": "3700000",
    f"{CPUS}/cpu0/cpufreq/cpuinfo_min_freq": "800000",
    f"{CPUS}/cpu0/cpufreq/base_frequency": "2100000",
    f"{CPUS}/cpu0/cache/index0/level": "1",
    f"{CPUS}/cpu0/cache/index0/type": "Data",
    f"{CPUS}/cpu0/cache/index0/size": "48K",
    f"{CPUS}/cpu0/cache/index0/coherency_line_size": "64",
    f"{CPUS}/cpu0/cache/index3/level": "3",
    f"{CPUS}/cpu0/cache/index3/type": "Unified",
    f"{CPUS}/cpu0/cache/index3/size": "105M",
    f"{CPUS}/cpu0/cache/index3/shared_cpu_list": "0,2",
    f"{CPUS}/cpufreq/boost": "1",
    "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu smep avx2 fma avx512f amx_tile sse4_2\ncpu MHz\t\t: 2599.998\n",
}


class Linux(mps.Host):
    system, machine = "linux", "x86_64"


def test_what_the_system_tells(tmp_path):
    found = read(planted(tmp_path, SERVER), Linux())
    assert found.pop("page_bytes") in {1 << k for k in range(12, 17)}
    assert found == {
        "architecture": "x86_64",
        "sockets": 2,
        "cores": 2,
        "processors": 4,
        "threads_a_core": 2,
        "clock_hz": 3_700_000_000,
        "base_clock_hz": 2_100_000_000,
        "least_clock_hz": 800_000_000,
        "clock_now_hz": 2_599_998_000,
        "l1_data_bytes": 48 << 10,
        "cache_line_bytes": 64,
        "l3_bytes": 105 << 20,
        "l3_shared_by": 2,
        "instruction_sets": ["amx_tile", "avx2", "avx512f", "fma", "sse4_2"],
    }


def test_arm_calls_its_flags_features(tmp_path):
    info = {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd sve2 i8mm\ncpu MHz : unknown"}
    found = read(planted(tmp_path, info), Linux())
    assert found["instruction_sets"] == ["asimd", "i8mm", "sve2"]
    assert "clock_now_hz" not in found


def test_a_system_that_tells_nothing(tmp_path):
    assert read(tmp_path, Linux()).keys() == {"architecture", "page_bytes"}


def test_apples_table(tmp_path):
    class Mac(mps.Host):
        system, machine = "darwin", "arm64"

        def output(self, command):
            assert command == SYSCTL
            return (
                "hw.packages: 1\nhw.physicalcpu: 10\nhw.logicalcpu: 10\nhw.perflevel0.physicalcpu: 8\n"
                "hw.cachelinesize: 128\nhw.l2cachesize: 4194304\nhw.pagesize: 16384\nhw.model: Mac\n"
                "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_SME: 0\nhw.optional.neon: 1\n"
            )

    assert read(tmp_path, Mac()) == {
        "architecture": "arm64",
        "sockets": 1,
        "cores": 10,
        "processors": 10,
        "performance_cores": 8,
        "cache_line_bytes": 128,
        "l2_bytes": 4 << 20,
        "page_bytes": 16 << 10,
        "instruction_sets": ["bf16", "neon"],
    }
