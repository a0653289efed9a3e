"""What the environment shows of a machine's devices, read anew each time and never cached."""

import subprocess
import sys

import pytest

from kway.devices import cuda
from kway.devices.select import parse
from kway.devices.simulated import simulated
from kway.devices.topology import assemble
from kway.errors import UsageError

VALUES = ["", "-1", "3", "1,1", "0,9", "GPU-4a", None]
BUILD = {"version": "2.13", "cuda": "13.0", "hip": None, "git": "g", "remembered": {}}
GPU = {"name": "Card", "memory_total": 10, "memory_free": 9, "compute_capability": "9.0", "mig": []}


def environment(value):
    return {} if value is None else {"CUDA_VISIBLE_DEVICES": value}


@pytest.mark.parametrize("value", VALUES)
def test_x08_a_machine_without_gpus_takes_its_cpu(value):
    found = assemble(environment(value), simulated().cpu, cuda.absent(cuda.NO_DRIVER), BUILD)
    assert found.gpus == []
    assert parse("auto", found)[0] == "cpu"
    with pytest.raises(UsageError, match="cuda:0"):
        parse("cuda:0", found)


@pytest.mark.parametrize(
    ("value", "seen"), [("", []), ("-1", []), ("3", [3]), ("1,1", [1]), ("0,9", [0]), (None, [0, 1, 2, 3])]
)
def test_x08_a_machine_of_four_shows_what_the_variable_says(value, seen):
    gpus = [{**GPU, "physical": place, "uuid": f"GPU-{place}a"} for place in range(4)]
    found = assemble(environment(value), simulated().cpu, cuda.Driver("580", gpus, []), BUILD)
    shown = [gpu["physical"] for gpu in found.gpus]
    # torch takes a list up to its first bad entry, and nothing of one that repeats.
    assert shown == ([] if value == "1,1" else seen)
    if len(shown) < 2:
        with pytest.raises(UsageError, match=r"no GPU can be used|there is no cuda:1"):
            parse("cuda:0,1", found)


def test_x08_importing_touches_no_device_and_the_variable_counts_when_it_is_asked():
    code = (
        "import kway, sys, os; assert 'torch' not in sys.modules; from kway.devices.topology import discover;"
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''; print(len(discover().gpus))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "0\n"
