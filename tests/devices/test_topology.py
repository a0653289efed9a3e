import pytest

from kway.devices import cuda
from kway.devices.simulated import simulated
from kway.devices.topology import assemble, discover
from kway.records import Cluster

CPU = simulated().cpu
GPU = {"name": "Card", "memory_total": 10, "memory_free": 9, "compute_capability": "7.0", "mig": []}


def driver(count, **changes):
    gpus = [{**GPU, "physical": i, "uuid": f"GPU-{i}", **changes} for i in range(count)]
    links = [
        {"a": a, "b": b, "peer": True, "over": f"{a}{b}", "nvlinks": None}
        for a in range(count)
        for b in range(a + 1, count)
    ]
    return cuda.Driver("570", gpus, links)


def build(cuda_version="13.0", version="2.13", **remembered):
    return {"version": version, "cuda": cuda_version, "hip": None, "git": "g", "remembered": remembered}


def test_order_of_the_environment_is_torchs_order():
    found = assemble({"CUDA_VISIBLE_DEVICES": "3,0"}, CPU, driver(4), build())
    assert [(gpu["index"], gpu["physical"]) for gpu in found.gpus] == [(0, 3), (1, 0)]
    assert [gpu["physical"] for gpu in found.hidden] == [1, 2]
    assert "CUDA_VISIBLE_DEVICES=3,0" in found.hidden[0]["why"]
    assert [(link["a"], link["b"], link["over"]) for link in found.links] == [(0, 1, "03")]
    assert found.backends["cuda"]["name"] == "nccl"
    assert found.warnings == []


@pytest.mark.parametrize("value", ["", "-1"])
def test_all_hidden(value):
    found = assemble({"CUDA_VISIBLE_DEVICES": value}, CPU, driver(2), build())
    assert found.gpus == []
    assert len(found.hidden) == 2
    assert found.backends["cuda"]["name"] == "none"
    assert f"CUDA_VISIBLE_DEVICES={value} hides all 2 GPUs" in found.backends["cuda"]["why"]
    assert found.warnings == []


def test_torch_without_cuda_hides_what_the_driver_shows():
    found = assemble({}, CPU, driver(2), build(None, "2.13+cpu"))
    assert found.gpus == []
    assert [gpu["why"] for gpu in found.hidden] == ["torch 2.13+cpu is built without CUDA"] * 2
    assert found.backends["cuda"]["name"] == "none"
    (warning,) = found.warnings
    assert "the driver shows 2 GPUs" in warning
    assert "install a CUDA build of torch" in warning


def test_no_torch():
    found = assemble({}, CPU, driver(1), build(None, None))
    assert found.gpus == []
    assert "torch is not installed" in found.hidden[0]["why"]
    assert any("nothing can be trained" in warning for warning in found.warnings)


def test_a_driver_that_does_not_answer_is_reported():
    found = assemble({}, CPU, cuda.absent("the NVIDIA driver does not answer: mismatch"), build())
    assert found.warnings == ["the NVIDIA driver does not answer: mismatch"]
    assert found.backends["cuda"]["why"] == "the NVIDIA driver does not answer: mismatch"


def test_a_machine_without_driver_is_quiet():
    found = assemble({"CUDA_VISIBLE_DEVICES": "0,1"}, CPU, cuda.absent(cuda.NO_DRIVER), build())
    assert found.warnings == []
    assert found.backends["cuda"] == {"name": "none", "why": cuda.NO_DRIVER}


def test_warnings_of_all_parts_come_together():
    environ = {"CUDA_VISIBLE_DEVICES": "1,1", "CUDA_VISIBLE_DEVICE": "1"}
    processors = {**CPU, "affinity": 8, "quota": 2.0, "usable": 2}
    warnings = assemble(environ, processors, driver(2), build()).warnings
    assert [
        part in "\n".join(warnings) for part in ("CUDA_VISIBLE_DEVICE is set", "repeats", "time of 2")
    ] == [True] * 3


def test_a_build_without_nccl_serves_no_gpus():
    facts = {"nccl": None, "backends": {"gloo": True, "nccl": False, "mpi": False}, "architectures": []}
    found = assemble({}, CPU, driver(2), build(**facts))
    assert found.backends["cuda"] == {"name": "none", "why": "this torch has neither of NCCL and MPI"}
    found = assemble({}, CPU, driver(2), build(**{**facts, "backends": facts["backends"] | {"mpi": True}}))
    assert found.backends["cuda"]["name"] == "mpi"
    assert found.backends["cuda"]["rule"] == "rule 7: anything else over any link -> MPI"


def test_gpus_older_than_torchs_code():
    facts = {"nccl": "2", "backends": {"gloo": True, "nccl": True, "mpi": False}}
    old = assemble({}, CPU, driver(1), build(**facts, architectures=["sm_75", "sm_90", "compute_90"]))
    assert "compute capability 7.0" in old.warnings[0]
    assert assemble({}, CPU, driver(1), build(**facts, architectures=["sm_70"])).warnings == []


def test_this_machine(tmp_path):
    found = discover({"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREAD": "1"})
    assert found.gpus == []
    assert found.cpu["usable"] >= 1
    assert found.cpu["memory_total"] >= found.cpu["memory_available"] > 0
    assert any("OMP_NUM_THREADS" in warning for warning in found.warnings)
    found.save(tmp_path)
    assert Cluster.load(tmp_path) == found


def test_simulated_machines():
    found = simulated(gpus=4, cores=16, visible="2,0", over="sockets")
    assert [gpu["physical"] for gpu in found.gpus] == [2, 0]
    assert found.links == [{"a": 0, "b": 1, "peer": True, "over": "sockets", "nvlinks": None}]
    assert found.cpu["usable"] == 16
    assert simulated(gpus=2, torch_cuda=None).gpus == []
