"""Figures, limits, and the record that holds them."""

import json
import math

import pytest

from kway.devices import gpu_rates
from kway.devices.cpu_peak import flops_s
from kway.devices.simulated import simulated
from kway.errors import UsageError
from kway.measurements import Measurements
from kway.measuring.figure import Maker
from kway.measuring.limits import gpu_flops, limits_of, peer_limits

ENTRY = {
    "name": "compute", "how": "measured", "why": "", "quick": True, "made": "2026-11-29T12:00:00+00:00", "age_s": 0.0,
    "seconds": 1.0, "tries": 1, "drift": 0.01, "noisy": "", "left": {}, "notes": [],
}  # fmt: skip


def record(*figures, entries=(ENTRY,)):
    return Measurements(
        machine={"cpu": "a CPU", "usable": 2, "gpus": []},
        versions={"torch": "2"},
        devices=["cpu"],
        quick=True,
        made=ENTRY["made"],
        age_s=0.0,
        seconds=1.0,
        experiments=list(entries),
        figures=list(figures),
    )


def figure(**changes):
    made = Maker("compute").timed("product", {"n": 4}, "FLOP/s", [1.0, 2.0, 4.0], lambda s: 128 / s, 256.0)
    return made.to_dict() | changes


def test_a_figure_is_the_median_of_its_samples_in_their_unit():
    found = figure()
    assert found["raw"] == [128.0, 64.0, 32.0]
    assert found["value"] == 64.0
    assert found["share"] == 0.25
    assert found["spread"] == pytest.approx((115.2 - 38.4) / 64)


@pytest.mark.parametrize(("raw", "drift", "spread"), [([1.0] * 3, 0.0, 0.01), ([1.0] * 3, 0.2, 0.2)])
def test_no_figure_is_surer_than_its_samples_are_long_or_the_machine_stood_still(raw, drift, spread):
    assert Maker("compute", drift).timed("x", {}, "s", raw).spread == spread


def test_a_record_comes_back_as_it_was(tmp_path):
    held = record(figure())
    held.save(tmp_path)
    assert Measurements.load(tmp_path) == held
    assert json.loads((tmp_path / "measurements.json").read_text())["schema"] == 1


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (figure(value="fast"), "value is 'fast'"),
        (figure(value=True), "value is True"),
        (figure(value=math.inf), "value is inf, not a finite number"),
        (figure(raw=[math.nan]), "raw[0] is nan, not a finite number"),
        (figure(spread=-0.1), "spread is -0.1"),
        (figure(share=None), "limit and share"),
        (figure(experiment="other"), "not among those"),
        (figure(parameters={"n": [1]}), "parameters: n is a list, not a text or"),
        ({"name": "x"}, "experiment is missing"),
        ("x", "figures[1] is 'x', not a table of fields"),
    ],
)
def test_a_broken_figure_is_refused(broken, complaint):
    with pytest.raises(UsageError, match=r"a measurements record that .*: figures\[1\]") as caught:
        record(figure(), broken)
    assert complaint in str(caught.value)


def test_figures_are_found_by_name_and_parameters():
    held = record(figure(), figure(parameters={"n": 8}))
    assert held.find("compute", "product", n=8) == [held.figures[1]]
    assert len(held.find("compute", "product")) == 2
    assert held.find("compute", "product", m=8) == []


class Nvml:
    """A driver that answers with what it was given, and refuses the rest."""

    def __init__(self, **answers):
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        clocks = {1: answers.pop("sm", 0), 2: answers.pop("memory", 0)}
        self.nvmlDeviceGetMaxClockInfo = lambda handle, kind: clocks[kind]
        for name, value in answers.items():
            setattr(self, f"nvmlDeviceGet{name}", lambda handle, value=value: value)


def test_the_limits_of_a_gpu_are_those_of_its_data_sheet():
    # H100 SXM: 132 multiprocessors, 1980 MHz at most, HBM3 at 2619 MHz, 5120 bits: 67 TFLOP/s and 3.35 TB/s.
    slot = {"MaxPcieLinkGeneration": 5, "MaxPcieLinkWidth": 16}
    rates = gpu_rates.read(0, lambda: Nvml(sm=1980, memory=2619, MemoryBusWidth=5120, **slot))
    peaks = gpu_flops("9.0", 132, rates.clock)
    assert peaks["fp32"] == pytest.approx(66.9e12, rel=0.01)
    assert peaks["bf16"] == 16 * peaks["fp32"]
    assert rates.memory == pytest.approx(3.35e12, rel=0.01)
    assert rates.slot == pytest.approx(63e9, rel=0.01)


def test_what_is_not_told_is_no_limit():
    assert gpu_rates.read(0, lambda: Nvml(MaxPcieLinkGeneration=4)) == (None, None, None)
    assert gpu_rates.read(0, object) == (None, None, None)
    assert gpu_flops("9.0", 132, None) == gpu_flops("6.1", 20, 1e9) == {}
    assert limits_of(simulated(), ("cpu",)).memory == {}


def test_what_links_between_gpus_carry():
    cluster = simulated(gpus=3)
    assert peer_limits(cluster, ("cpu", "cuda:0", "cuda:1")) == {}
    for link in cluster.links:
        link["nvlinks"] = 18
    assert peer_limits(cluster, ("cpu", "cuda:0", "cuda:1")) == {
        ("cuda:0", "cuda:1"): 450e9,
        ("cuda:1", "cuda:0"): 450e9,
    }


def test_what_cores_can_compute_at_most(tmp_path):
    assert flops_s(8, tmp_path) == {}
    clock = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"
    clock.parent.mkdir(parents=True)
    clock.write_text("3000000\n")
    (tmp_path / "proc").mkdir()
    info = tmp_path / "proc/cpuinfo"
    info.write_text("model name : x\nflags : fpu avx2 fma\n")
    # 8 cores, 3 GHz, 32 operations a clock in single precision.
    assert flops_s(8, tmp_path) == {"fp32": pytest.approx(768e9), "fp64": pytest.approx(384e9)}
    info.write_text("flags : fpu fma avx512f\n")
    assert flops_s(8, tmp_path)["fp32"] == pytest.approx(1536e9)
    info.write_text("flags : fpu\n")
    assert flops_s(8, tmp_path) == {}
