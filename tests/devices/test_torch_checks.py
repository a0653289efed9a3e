import sys
from dataclasses import replace

import pytest

from kway.devices import torch_probe
from kway.devices.checks import FAIL
from kway.devices.cuda import absent
from kway.devices.doctor import examine, failed
from kway.devices.simulated import simulated
from kway.devices.topology import assemble
from kway.devices.torch_checks import back_ends, checks, compiler, gpus_work, metal_works, torch_works


def probe(count=0, **changes):
    backends = {"gloo": True, "nccl": count > 0, "mpi": False}
    return {
        "version": "2.13.0+cu130",
        "cpu": True,
        "gpus": [{"name": "Card", "error": ""} for _ in range(count)],
        "all_reduce": {"error": ""} if count > 1 else None,
        "remembered": {"nccl": "2.28.9" if count else None, "backends": backends, "architectures": []},
        "mps": False,
        "seconds": 2.0,
        **changes,
    }


def machine(gpus=2, driver_cuda="13.0", **options):
    return replace(simulated(gpus=gpus, **options), driver_cuda=driver_cuda)


def test_a_machine_that_is_well():
    found = list(checks(machine(), probe(2), lambda device: None))
    assert {check.outcome for check in found} == {"ok"}
    assert [check.name for check in found] == ["torch", "GPUs", "Gloo", "NCCL", "compiler"]
    assert "2 computed a sum; torch is built for CUDA 13.0, the driver runs 13.0" in found[1].found
    assert "2.28.9; all-reduce over 2 GPUs is right" in found[3].found


@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        ({}, "ok", "loads and computes, 2.0 s"),
        ({"version": "2.11.0"}, "ok", "2.11.0"),
        ({"version": "2.10.1+cpu"}, "fail", "2.10.1+cpu is older than 2.11"),
        ({"cpu": False}, "fail", "wrong products"),
        ({"error": "loading torch was ended by SIGILL"}, "fail", "SIGILL"),
    ],
)
def test_torch(changes, outcome, words):
    found = torch_works(probe(**changes))
    assert found.outcome == outcome
    assert words in found.found
    assert bool(found.do) == (outcome == "fail")


@pytest.mark.parametrize(
    ("cluster", "tried", "outcome", "words"),
    [
        (machine(driver_cuda="12.8"), probe(2), "ok",
         "2 computed a sum; torch is built for CUDA 13.0, the driver runs 12.8"),
        (machine(driver_cuda="12.8"), probe(), "fail",
         "the driver shows 2, torch sees 0; torch is built for CUDA 13.0, driver simulated runs CUDA 12.8 at most"),
        (machine(1, driver_cuda="12.8"), probe(1, gpus=[{"name": "A", "error": "unsupported PTX"}]), "fail",
         "cuda:0 (A): unsupported PTX; torch is built for CUDA 13.0"),
        (machine(visible="", driver_cuda="12.8"), probe(), "ok", "hides all 2 GPUs"),
        (machine(driver_cuda="13.1", torch_cuda="12.6"), probe(2), "ok", "2 computed"),
        (machine(driver_cuda=None), probe(2), "ok", "the driver runs ?"),
        (machine(torch_cuda=None), probe(), "fail", "2 there, but torch simulated is built without CUDA"),
        (machine(visible=""), probe(), "ok", "hides all 2 GPUs"),
        (machine(gpus=0, driver_cuda=None), probe(), "ok", "no NVIDIA driver was found"),
        (machine(), probe(1), "fail", "the driver shows 2, torch sees 1"),
        (machine(), probe(2, gpus=[{"name": "A", "error": ""}, {"name": "B", "error": "no kernel image"}]), "fail",
         "cuda:1 (B): no kernel image"),
        (machine(), {"error": "torch is broken"}, "warn", "not tried"),
    ],
)  # fmt: skip
def test_gpus(cluster, tried, outcome, words):
    found = gpus_work(cluster, tried)
    assert found.outcome == outcome
    assert words in found.found
    assert bool(found.do) == (outcome != "ok")


def test_only_an_old_driver_is_to_be_updated():
    bad = probe(1, gpus=[{"name": "A", "error": "unsupported PTX"}])
    old, new = (gpus_work(machine(1, driver_cuda=version), bad) for version in ("12.8", "13.0"))
    assert old.do == "update the driver, or install a torch for CUDA 12"
    assert new.do.startswith("install a torch with code for these GPUs")
    assert "built for" not in new.found


def test_a_driver_that_does_not_answer():
    build = {"version": "2.13", "cuda": "13.0", "hip": None, "git": None}
    broken = assemble({}, simulated().cpu, absent("the NVIDIA driver does not answer: mismatch"), build)
    found = gpus_work(broken, probe())
    assert (found.outcome, found.found) == ("fail", "the NVIDIA driver does not answer: mismatch")
    assert "restart the driver" in found.do


def without(name, gpus):
    made = probe(gpus)
    made["remembered"]["backends"][name] = False
    return made


@pytest.mark.parametrize(
    ("tried", "outcomes", "words"),
    [
        (probe(), ["ok", "ok"], "no GPU needs it"),
        (probe(1), ["ok", "ok"], "one GPU has nobody to talk to"),
        (without("nccl", 1), ["ok", "warn"], "GPU ranks cannot talk"),
        (without("nccl", 2), ["ok", "fail"], "GPU ranks cannot talk"),
        (without("gloo", 0), ["fail", "ok"], "CPU ranks cannot talk"),
        (probe(4, all_reduce={"error": "NCCL Error 2"}), ["ok", "fail"], "over 4 GPUs: NCCL Error 2"),
    ],
)
def test_back_ends(tried, outcomes, words):
    found = list(back_ends(tried))
    assert [check.outcome for check in found] == outcomes
    assert any(words in check.found for check in found)


def test_apples_gpu():
    mps = {"name": "Apple M1", "usable": True, "why": "no ranks"}
    assert metal_works(mps, probe(mps=True)).outcome == "ok"
    assert metal_works(mps, probe(mps=False)).outcome == "warn"
    assert metal_works(mps | {"usable": False}, probe(mps=False)).outcome == "ok"
    named = [check.name for check in checks(replace(machine(gpus=0), mps=mps), probe(), lambda device: None)]
    assert "MPS" in named


def test_compilers():
    lacks = {"cpu": None, "cuda": "the package triton is not installed"}
    assert compiler(lacks.get, has_gpus=False).outcome == "ok"
    found = compiler(lacks.get, has_gpus=True)
    assert (found.outcome, found.found) == (
        "warn", "torch.compile cannot compile for cuda: the package triton is not installed"
    )  # fmt: skip


def test_a_probe_that_dies_says_by_what():
    def ended(code, limit=20.0):
        return torch_probe.run((sys.executable, "-c", code), limit)["error"]

    assert ended("import os; os.kill(os.getpid(), 11)") == "loading torch was ended by SIGSEGV"
    assert ended("raise ImportError('libgomp.so.1: cannot open')") == (
        "loading torch ended with exit code 1: ImportError: libgomp.so.1: cannot open"
    )
    assert ended("print('nothing')") == "loading torch ended with exit code 0"
    assert "did not end within 0.2 s" in ended("import time; time.sleep(60)", 0.2)


def test_what_cannot_be_tried_is_a_failure():
    found = examine(simulated(), {}, lambda: {"error": "no torch"})
    assert failed(found)
    assert [check.name for check in found if check.outcome == FAIL] == ["torch"]
    names = {check.name for check in found}
    assert {"compiler", "shared memory", "open files", "loopback", "host name", "processors"} < names


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: (3.0, 3.0), ""),
        (lambda: (2.0, 3.0), "it computed 2 in place of 3"),
        (lambda: 1 / 0, "division by zero"),
    ],
)
def test_a_trial_says_what_went_wrong(work, said):
    assert torch_probe._tried(work) == said
