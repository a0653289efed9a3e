# ruff: noqa: N802 - the stand-in has the names of CUDA's library
import ctypes
import re
from pathlib import Path

from tests.devices.system_tree import planted
from tests.devices.test_mps import Mac
from tests.devices.test_rocm import HAS, HIP, NODES, TREE

from kway.backends import RULES, TITLES
from kway.devices import cpu_attributes, mps, rocm
from kway.devices.attributes import describe
from kway.devices.fabric import Surroundings
from kway.devices.gpu_attributes import NUMBERS, SWITCHES, read
from kway.devices.rocm_attributes import read as read_amd
from kway.devices.simulated import simulated
from kway.devices.topology import assemble

# As an H100 answers, by CUDA's numbers of the attributes; it does not know number 116.
H100 = {
    16: 132, 10: 32, 1: 1024, 39: 2048, 106: 32, 12: 65536, 82: 65536, 8: 49152, 97: 232448, 81: 233472, 9: 65536,
    38: 52428800, 108: 32768000, 13: 1980000, 36: 2619000, 37: 5120, 40: 3, 75: 9, 76: 0, 2: 1024, 3: 1024, 4: 64,
    5: 2147483647, 6: 65535, 7: 65535, 31: 1, 32: 1, 18: 0, 41: 1, 83: 1, 89: 1, 95: 1, 115: 1,
}  # fmt: skip


class Library:
    """CUDA's library with so many of these GPUs; ``broken``: the call that returns an error."""

    def __init__(self, count=2, table=H100, broken=""):
        self.count, self.table, self.broken = count, table, broken

    def cuInit(self, flags):
        return 100 * (self.broken == "cuInit")

    def cuDeviceGetCount(self, place):
        place._obj.value = self.count
        return self.broken == "cuDeviceGetCount"

    def cuDeviceGet(self, place, index):
        place._obj.value = 40 + index
        return self.broken == "cuDeviceGet"

    def cuDeviceGetAttribute(self, place, number, device):
        assert isinstance(device, ctypes.c_int)
        assert device.value >= 40
        place._obj.value = self.table.get(number, 7)
        return number not in self.table


def test_what_cuda_tells_of_each_gpu():
    first, second = read(Library)
    assert first == second
    assert first["multiprocessors"] == 132
    assert first["threads_a_block"] == 1024
    assert first["shared_memory_a_block_at_most_bytes"] == 232448
    assert first["l2_bytes"] == 50 << 20
    assert first["clock_hz"] == 1_980_000_000
    assert first["memory_bytes_s"] == 2 * 2_619_000_000 * 5120 // 8
    assert first["compute_capability"] == [9, 0]
    assert first["grid"] == [2147483647, 65535, 65535]
    assert first["error_correction"] is True
    assert first["integrated"] is False
    assert "gpu_direct_rdma" not in first
    assert {*NUMBERS, *SWITCHES} - {"gpu_direct_rdma"} < first.keys()


def test_what_a_driver_does_not_tell_is_left_out():
    (found,) = read(lambda: Library(1, {75: 8, 13: 0, 16: 108, 36: 5}))
    assert found == {"multiprocessors": 108, "memory_clock_hz": 5000}


def test_no_library_and_no_gpu():
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert read(missing) == []
    assert read(object) == []
    assert read(lambda: Library(broken="cuInit")) == []
    assert read(lambda: Library(broken="cuDeviceGetCount")) == []
    assert read(lambda: Library(1, broken="cuDeviceGet")) == [{}]


def test_what_amds_tree_tells(tmp_path):
    caches = {
        f"{NODES}/1/caches/0/properties": "level 1\nsize 16",
        f"{NODES}/1/caches/1/properties": "level 2\nsize 8192",
    }
    first, second, third = read_amd(planted(tmp_path, TREE | caches))
    assert first == {
        "architecture": "gfx90a",
        "multiprocessors": 110,
        "warp_size": 64,
        "threads_a_block": 1024,
        "threads_a_multiprocessor": 8 * 4 * 64,
        "shared_memory_a_block_bytes": 64 << 10,
        "l2_bytes": 8 << 20,
        "clock_hz": 1_700_000_000,
        "memory_clock_hz": 1_600_000_000,
        "memory_bus_bits": 4096,
        "memory_bytes_s": 2 * 1_600_000_000 * 4096 // 8,
        "chiplets": 1,
    }
    assert "l2_bytes" not in second
    assert "memory_bus_bits" not in third


def test_each_visible_device_has_its_own(tmp_path):
    cards = [{"multiprocessors": 1}, {"multiprocessors": 2}]
    found = describe(simulated(gpus=3, visible="2,0"), tmp_path, lambda: cards)
    assert found.keys() == {"cpu", "cuda:0", "cuda:1"}
    assert (found["cuda:0"], found["cuda:1"]) == tuple(cards)
    assert describe(simulated(gpus=1), tmp_path, list)["cuda:0"] == {}


def test_amds_are_looked_up_by_the_drivers_number(tmp_path):
    tree = TREE | {f"{NODES}/2/properties": TREE[f"{NODES}/2/properties"].replace("1700", "1500")}
    driver = rocm.read(planted(tmp_path, tree))
    environ = {"HIP_VISIBLE_DEVICES": "1,0"}
    cluster = assemble(environ, simulated().cpu, driver, {**HIP, "remembered": {"backends": HAS}})
    found = describe(cluster, tmp_path)
    assert [found[name]["clock_hz"] // 10**8 for name in ("cuda:0", "cuda:1")] == [15, 17]


def test_an_apple_computer(tmp_path):
    around = Surroundings(mps={"name": "Apple M1 Pro", "memory_total": 1, "usable": True, "why": ""})
    cluster = assemble({}, simulated().cpu, rocm.read(tmp_path), {**HIP, "hip": None}, around)

    class Computer(Mac):
        def output(self, command):
            return "" if command == ("sysctl", "hw") else super().output(command)

    assert describe(cluster, tmp_path, list, Computer())["mps"]["gpu_cores"] == 16


def test_the_guide_explains_every_attribute(tmp_path):
    text = (Path(__file__).parents[2] / "docs/guide/devices.md").read_text()
    text = text[text.index("## Attributes") : text.index("## The doctor")]
    amd, nvidia = read_amd(planted(tmp_path, TREE))[0], read(Library)[0]
    names = {*NUMBERS, *SWITCHES, *amd, *nvidia, *mps.attributes(Mac()), *cpu_attributes.read()}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_the_guide_shows_the_table_of_back_ends():
    text = (Path(__file__).parents[2] / "docs/guide/devices.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.+?) \| (.+?) \| (\w+) \|$", text, re.MULTILINE)
    assert rows == [
        (str(number), rule.devices, rule.over, TITLES[rule.backend]) for number, rule in enumerate(RULES, 1)
    ]
