import pytest
from tests.devices.system_tree import planted

from kway.devices.fabric import Surroundings
from kway.devices.rocm import NO_DRIVER, architecture, read
from kway.devices.rocm_visible import hiding, seen
from kway.devices.simulated import simulated
from kway.devices.topology import assemble

NODES = "sys/class/kfd/kfd/topology/nodes"
# Two MI250X dies beside one processor, in the form of the kernel's tree.
GPU = """cpu_cores_count 0
simd_count 440
mem_banks_count 1
caches_count 226
io_links_count 2
max_waves_per_simd 8
lds_size_in_kb 64
wave_front_size 64
simd_per_cu 4
gfx_target_version 90010
vendor_id 4098
location_id {place}
domain 0
unique_id {unique}
max_engine_clk_fcompute 1700
num_xcc 1"""
BANK = "heap_type 1\nsize_in_bytes 68702699520\nflags 0\nwidth 4096\nmem_clk_max 1600"
LINK = "type {kind}\nnode_from {here}\nnode_to {there}\nweight 15"
TREE = {
    f"{NODES}/0/properties": "cpu_cores_count 64\nsimd_count 0",
    f"{NODES}/1/properties": GPU.format(place=0xC100, unique=0x1234),
    f"{NODES}/1/name": "aldebaran",
    f"{NODES}/1/mem_banks/0/properties": BANK,
    f"{NODES}/1/io_links/0/properties": LINK.format(kind=2, here=1, there=0),
    f"{NODES}/1/io_links/1/properties": LINK.format(kind=11, here=1, there=2),
    f"{NODES}/2/properties": GPU.format(place=0xC608, unique=0xABCD),
    f"{NODES}/2/name": "aldebaran",
    f"{NODES}/2/mem_banks/0/properties": BANK,
    f"{NODES}/10/properties": GPU.format(place=0xC700, unique=0),
    "sys/bus/pci/devices/0000:c1:00.0/mem_info_vram_total": str(64 << 30),
    "sys/bus/pci/devices/0000:c1:00.0/mem_info_vram_used": str(1 << 30),
    "sys/bus/pci/devices/0000:c1:00.0/product_name": "AMD Instinct MI250X",
    "sys/module/amdgpu/version": "6.7.0",
}
HIP = {"version": "2.13+rocm7.0", "cuda": None, "hip": "7.0.51831", "git": "g"}
HAS = {"gloo": True, "nccl": True, "mpi": False}


def test_gpus_of_the_drivers_tree(tmp_path):
    driver = read(planted(tmp_path, TREE))
    assert (driver.maker, driver.version, driver.problem) == ("AMD", "6.7.0", "")
    assert driver.gpus[0] == {
        "physical": 0,
        "name": "AMD Instinct MI250X",
        "uuid": "GPU-0000000000001234",
        "memory_total": 64 << 30,
        "memory_free": 63 << 30,
        "compute_capability": "gfx90a",
        "bus": "0000:c1:00.0",
        "mig": [],
    }
    second, third = driver.gpus[1:]
    assert (second["name"], second["bus"], second["memory_total"]) == (
        "aldebaran",
        "0000:c6:01.0",
        68702699520,
    )
    assert second["memory_free"] is None
    assert (third["physical"], third["uuid"], third["memory_total"]) == (2, None, None)
    assert [(link["a"], link["b"], link["over"], link["peer"]) for link in driver.links] == [
        (0, 1, "xgmi", True),
        (0, 2, "unknown", None),
        (1, 2, "unknown", None),
    ]


def test_no_driver_and_no_gpu(tmp_path):
    assert read(tmp_path).problem == NO_DRIVER
    only_processor = {name: TREE[name] for name in TREE if name.startswith(f"{NODES}/0/")}
    assert read(planted(tmp_path, only_processor)).problem == "the driver of AMD GPUs lists no GPU"


@pytest.mark.parametrize(
    ("version", "name"), [(90010, "gfx90a"), (90402, "gfx942"), (110000, "gfx1100"), (90006, "gfx906")]
)
def test_architectures_are_named_as_compilers_do(version, name):
    assert architecture(version) == name


@pytest.mark.parametrize(
    ("environ", "physical"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-02"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, []),
        ({"HIP_VISIBLE_DEVICES": "2,9,1"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "1, 2"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "1, 2"}, [1, 2]),
        ({"HIP_VISIBLE_DEVICES": "2,2,1"}, [2, 1]),
        ({"ROCR_VISIBLE_DEVICES": "2,2,1"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "GPU-0"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "gpu-03"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0"}, []),
    ],
)
def test_what_the_environment_leaves(environ, physical):
    gpus = [{"uuid": f"GPU-0{index}", "name": "Card"} for index in range(4)]
    assert seen(environ, gpus).physical == physical


def test_the_variable_that_is_wrong_is_named():
    (warning,) = seen({"HIP_VISIBLE_DEVICES": "0,7"}, [{"uuid": "GPU-0", "name": "Card"}]).warnings
    assert warning.startswith("HIP_VISIBLE_DEVICES=0,7: '7' names none of 1 GPUs")
    (warning,) = seen({"ROCR_VISIBLE_DEVICES": "0,0"}, [{"uuid": "GPU-0", "name": "Card"}]).warnings
    assert "'0' repeats a GPU; ROCm ignores this entry and all after it" in warning
    assert seen({"ROCR_VISIBLE_DEVICES": "-1"}, [{"uuid": "GPU-0", "name": "Card"}]).warnings == []
    assert hiding({"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}) == (
        "ROCR_VISIBLE_DEVICES=1 CUDA_VISIBLE_DEVICES=0"
    )


def machine(tmp_path, build, environ=None, **remembered):
    driver = read(planted(tmp_path, TREE))
    around = Surroundings(infiniband=[{"layer": "InfiniBand", "state": "ACTIVE"}])
    return assemble(environ or {}, simulated().cpu, driver, {**build, "remembered": remembered}, around)


def test_a_build_for_rocm_uses_them_over_nccl(tmp_path):
    found = machine(
        tmp_path, HIP, {"HIP_VISIBLE_DEVICES": "1,0"}, backends=HAS, architectures=["gfx90a:xnack-"]
    )
    assert [(gpu["index"], gpu["physical"]) for gpu in found.gpus] == [(0, 1), (1, 0)]
    assert found.hidden[0]["why"] == "left out by HIP_VISIBLE_DEVICES=1,0"
    assert found.backends["cuda"]["rule"] == "rule 1: GPUs over NVLink -> NCCL"
    assert found.backends["cuda"]["between_machines"] == "rule 3: GPUs over InfiniBand -> NCCL"
    assert found.warnings == []


def test_gpus_that_this_build_has_no_code_for(tmp_path):
    warnings = machine(tmp_path, HIP, backends=HAS, architectures=["gfx942", "gfx1100"]).warnings
    assert warnings[0] == "cuda:0 is a gfx90a, which this torch has no code for"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cuda": "13.0", "hip": None, "version": "2.13"}, "torch 2.13 is built for CUDA, these are AMD's"),
        ({"hip": None, "version": "2.13+cpu"}, "torch 2.13+cpu is built without ROCm"),
    ],
)
def test_other_builds_hide_them(tmp_path, changes, why):
    found = machine(tmp_path, {**HIP, **changes})
    assert found.gpus == []
    assert [gpu["why"] for gpu in found.hidden] == [why] * 3
    assert found.backends["cuda"] == {"name": "none", "why": why}
    assert found.warnings == [
        f"the driver shows 3 GPUs, but {why}: install a ROCm build of torch to use them"
    ]
