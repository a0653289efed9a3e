import json
import os
import subprocess
import sys

import pytest
import torch

from kway.devices.attributes import describe
from kway.devices.cuda import read
from kway.devices.doctor import examine
from kway.devices.topology import discover

pytestmark = pytest.mark.gpu

# What CUDA itself shows under the environment of this process, and what kway says it would.
BOTH = """
import json
from kway.devices.topology import discover
ours = [gpu["uuid"] for gpu in discover().gpus]
import torch
# Not torch.cuda.device_count(), which reads the variable by itself: CUDA's own count is the judge.
count = torch._C._cuda_getDeviceCount()
theirs = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count)]
print(json.dumps([ours, theirs]))
"""


def both(visible):
    """Start the comparison under a value of CUDA_VISIBLE_DEVICES."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BOTH]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_each_gpu_is_what_torch_says_it_is():
    found = discover().gpus
    assert len(found) == torch.cuda.device_count()
    for gpu in found:
        card = torch.cuda.get_device_properties(gpu["index"])
        assert gpu["name"] == card.name
        assert gpu["uuid"] == f"GPU-{card.uuid}"
        assert gpu["compute_capability"] == f"{card.major}.{card.minor}"
        # The driver counts what it keeps for itself, CUDA does not.
        assert card.total_memory <= gpu["memory_total"] <= card.total_memory * 1.06
        assert 0 < gpu["memory_free"] <= gpu["memory_total"]


def test_memory_that_is_taken_is_not_free():
    before = discover().gpus[0]["memory_free"]
    held = torch.ones(2 << 30, dtype=torch.uint8, device="cuda:0")
    after = discover().gpus[0]["memory_free"]
    del held
    torch.cuda.empty_cache()
    assert before - after >= 1.5 * (1 << 30)


def test_links_agree_with_torch_about_direct_access():
    links = discover().links
    count = torch.cuda.device_count()
    assert len(links) == count * (count - 1) // 2
    for link in links:
        if link["peer"] is not None:
            assert link["peer"] == torch.cuda.can_device_access_peer(link["a"], link["b"]), link


def test_order_and_number_under_cuda_visible_devices_are_those_of_cuda():
    cards = [gpu for gpu in read().gpus if not gpu["mig"]]
    last = len(cards) - 1
    backwards = ",".join(str(card["physical"]) for card in reversed(cards))
    values = [
        "0",
        str(last),
        backwards,
        cards[last]["uuid"],
        f"{cards[0]['uuid'][:12]}",
        f"0,{last + 9}",
        "0,0",
        "",
    ]
    started = {value: both(value) for value in values}
    seen = {value: json.loads(process.communicate(timeout=100)[0]) for value, process in started.items()}
    wrong = {value: pair for value, pair in seen.items() if pair[0] != pair[1]}
    assert not wrong, "kway's and CUDA's GPUs under each CUDA_VISIBLE_DEVICES"
    assert len(seen["0"][0]) == 1
    assert len(seen[backwards][0]) == len(cards)


def test_back_end_is_nccl_where_this_torch_has_it():
    from kway.devices import torch_facts

    facts = torch_facts.remember()
    assert facts["nccl"] == ".".join(map(str, torch.cuda.nccl.version()))
    assert discover().backends["cuda"]["name"] == "nccl"
    assert (
        discover().backends["cuda"]["rule"].startswith(("rule 1: GPUs over NVLink", "rule 2: GPUs over PCIe"))
    )


# Ours, and torch's name of the same.
SAME = {
    "multiprocessors": "multi_processor_count",
    "warp_size": "warp_size",
    "threads_a_block": "max_threads_per_block",
    "threads_a_multiprocessor": "max_threads_per_multi_processor",
    "registers_a_multiprocessor": "regs_per_multiprocessor",
    "shared_memory_a_block_bytes": "shared_memory_per_block",
    "shared_memory_a_block_at_most_bytes": "shared_memory_per_block_optin",
    "shared_memory_a_multiprocessor_bytes": "shared_memory_per_multiprocessor",
    "l2_bytes": "L2_cache_size",
    "memory_bus_bits": "memory_bus_width",
}


def test_attributes_are_torchs_and_the_doctor_finds_these_gpus_well():
    cluster = discover()
    found = describe(cluster)
    for gpu in cluster.gpus:
        facts, card = found[f"cuda:{gpu['index']}"], torch.cuda.get_device_properties(gpu["index"])
        theirs = {name: getattr(card, other) for name, other in SAME.items() if hasattr(card, other)}
        assert len(theirs) >= 6
        assert {name: facts.get(name) for name in theirs} == theirs
        assert facts["compute_capability"] == [card.major, card.minor]
        # In virtual machines the driver may know no clocks.
        assert 3e8 < facts.get("clock_hz", 1e9) < 1e10
        assert 1e10 < facts.get("memory_bytes_s", 1e12) < 1e14
    checks = {check.name: check for check in examine(cluster)}
    for name in ("torch", "GPUs", "Gloo", "NCCL"):
        assert checks[name].outcome == "ok", checks[name]
    assert f"{len(cluster.gpus)} computed a sum" in checks["GPUs"].found
    if len(cluster.gpus) > 1:
        assert f"all-reduce over {len(cluster.gpus)} GPUs is right" in checks["NCCL"].found


def test_looking_takes_no_gpu_memory_and_no_torch():
    # A context on a GPU opens its memory device; the driver's library alone, which NVML may load, does not.
    code = (
        "import sys, kway.cli.main as m; m.main(['devices', '--json'])\n"
        "import os; opened = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]\n"
        "print('torch' in sys.modules, '/dev/nvidia-uvm' in opened, file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert len(json.loads(done.stdout)["gpus"]) == torch.cuda.device_count()
    assert done.stderr.splitlines()[-1] == "False False"
