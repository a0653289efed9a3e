"""A workload of known lines, scaled by known rates: what it takes there can be said by hand."""

from dataclasses import replace

import pytest
from tests.measured import entry
from tests.workloads import FIXED_S, PER_SAMPLE_S, workload

from kway.elsewhere.machine import elsewhere
from kway.elsewhere.moving import moved, rates_of
from kway.errors import UsageError
from kway.measurements import Measurements


def measured(device, flops, memory, launch, copied=None, dtype="fp32"):
    """Figures of one device, of the form of ``kway measure``."""

    def figure(experiment, name, value, **parameters):
        return {
            "experiment": experiment, "name": name, "parameters": parameters, "unit": "", "value": value,
            "spread": None, "raw": [], "limit": None, "share": None, "notes": [],
        }  # fmt: skip

    figures = [
        figure("compute", "matrix product", flops / 2, device=device, dtype=dtype, n=64),
        figure("compute", "matrix product", flops, device=device, dtype=dtype, n=4096),
        figure("compute", "memory bandwidth", memory, device=device, bytes=1 << 20),
        figure("compute", "launch", launch, device=device, until="done" if device == "cpu" else "queued"),
    ]
    if copied:
        way = {"from": "cpu", "to": device, "memory": "pinned, non-blocking"}
        figures.append(figure("copies", "copy bandwidth", copied, **way))
    return Measurements(
        machine={"host": "h", "cpu": "a CPU", "gpus": ["a GPU"], "threads": 4}, versions={}, devices=["cpu", device],
        quick=True, made="", age_s=0.0, seconds=0.0, figures=figures,
        experiments=[entry("compute"), entry("copies")],
    )  # fmt: skip


# Products four times as fast, memory twice, a launch takes five times as long.
HERE = measured("cuda:0", 1e9, 1e9, 1e-6, 1e9)
THERE = measured("cuda:0", 4e9, 2e9, 5e-6, 4e9)


def one(bound="compute", **changes):
    """A workload on a GPU of one layer. What its 6,000 operations and 2,000 bytes take is far below its times."""
    made = workload(device="cuda:0", **changes)
    return replace(made, layers=[{**made.layers[0], "bound": bound}])


def line(record, part):
    fitted = record.fit("eager", part)
    return fitted["fixed_s"], fitted["per_sample_s"]


@pytest.mark.parametrize(("bound", "ratio"), [("compute", 1 / 4), ("memory", 1 / 2)])
def test_what_grows_goes_by_what_bounds_it_and_what_does_not_by_launches(bound, ratio):
    found = moved(one(bound), HERE, THERE)
    for part, share in (("forward", 0.3), ("backward", 0.6)):
        assert line(found, part) == pytest.approx((5 * share * FIXED_S, ratio * share * PER_SAMPLE_S))
        own = found.layers[0][part]
        assert own["fixed_s"] == pytest.approx(5 * share * FIXED_S)
        assert own["per_sample_s"] == pytest.approx(ratio * share * PER_SAMPLE_S)


def test_the_optimizer_goes_by_its_bytes_and_its_launches():
    found = moved(one(), HERE, THERE)
    # 4,000 bytes of gradients once, of weights and state twice: 20 us of the 50.
    assert line(found, "optimizer") == pytest.approx((20e-6 / 2 + 30e-6 * 5, 0.05 * PER_SAMPLE_S / 2))


def test_of_input_only_the_copy_changes():
    found = moved(one(), HERE, THERE)
    copied = 3144 * (1 / 4e9 - 1 / 1e9)
    assert line(found, "input") == pytest.approx((0.05 * FIXED_S, 0.05 * PER_SAMPLE_S + copied))


def test_a_step_is_its_parts():
    found = moved(one(), HERE, THERE)
    parts = [line(found, part) for part in ("forward", "backward", "optimizer", "input")]
    fixed, each = (sum(values) for values in zip(*parts, strict=True))
    assert line(found, "step") == pytest.approx((fixed, each))
    for timing in found.timed("eager"):
        assert timing["seconds"] == pytest.approx(fixed + each * timing["samples"])
        assert timing["spread"] == 0.02


def test_what_is_in_no_part_is_host_and_layers():
    made = one()
    fits = [{**fitted, "fixed_s": fitted["fixed_s"] + 1e-3, "per_sample_s": fitted["per_sample_s"] + 1e-4}
            if fitted["part"] == "step" else fitted for fitted in made.fits]  # fmt: skip
    more, plain = moved(replace(made, fits=fits), HERE, THERE), moved(made, HERE, THERE)
    assert line(more, "step")[0] == pytest.approx(line(plain, "step")[0] + 5 * 1e-3)
    assert line(more, "step")[1] == pytest.approx(line(plain, "step")[1] + 1e-4 / 4)


def test_parts_beside_each_other_shrink_together():
    made = one()
    fits = [
        {**fitted, "fixed_s": fitted["fixed_s"] / 2} if fitted["part"] == "step" else fitted
        for fitted in made.fits
    ]
    less, plain = moved(replace(made, fits=fits), HERE, THERE), moved(made, HERE, THERE)
    assert line(less, "step")[0] == pytest.approx(line(plain, "step")[0] / 2)


def test_a_step_kind_without_parts():
    made = one(step_kind="graph")
    only = replace(
        made,
        timings=[timing for timing in made.timings if timing["part"] == "step"],
        fits=[fitted for fitted in made.fits if fitted["part"] == "step"],
    )
    found = moved(only, HERE, THERE).fit("graph")
    assert found["fixed_s"] == pytest.approx(20e-6 / 2 + (FIXED_S - 20e-6) * 5)
    assert found["per_sample_s"] == pytest.approx(PER_SAMPLE_S / 4)


def test_another_bound_may_take_over():
    made = one()
    layer = {**made.layers[0], "activation_bytes_per_sample": 12_500.0}
    # 25 us forward and 50 us backward for its bytes, of the 30 and 60 measured: memory half as fast bounds it there.
    slower = measured("cuda:0", 4e9, 0.5e9, 5e-6)
    found = moved(replace(made, layers=[layer]), HERE, slower).layers[0]
    assert found["forward"]["per_sample_s"] == pytest.approx(2 * 25e-6)
    assert found["bound"] == "memory"
    assert "bound by compute where it was measured" in found["why"]


def test_a_layer_that_only_launches_is_told_apart():
    made = one()
    layer = {**made.layers[0], "forward": {"fixed_s": 1e-3, "per_sample_s": 0.0},
             "backward": {"fixed_s": 1e-3, "per_sample_s": 0.0}, "bound": "launch"}  # fmt: skip
    found = moved(replace(made, layers=[layer]), HERE, THERE).layers[0]
    assert (found["bound"], found["forward"]["fixed_s"]) == ("launch", pytest.approx(5e-3))


def test_where_nothing_changes_nothing_does():
    made = one()
    found = moved(made, HERE, HERE)
    for before, after in zip(made.timings, found.timings, strict=True):
        assert after["seconds"] == pytest.approx(before["seconds"])
    assert found.parameters == made.parameters
    assert found.memory == made.memory


def test_it_says_that_it_is_an_estimate():
    found = moved(one(), HERE, THERE)
    assert (found.device, found.device_name, found.machine["host"]) == ("cuda:0", "a GPU", "h")
    assert found.notices[-1].startswith(
        "an estimate: measured on simulated CPU, scaled to a GPU (products 1 GFLOP/s to 4 GFLOP/s"
    )
    assert {timing["threads"] for timing in found.timings} == {4}
    noisy = replace(HERE, experiments=[entry("compute", noisy="it drifted"), entry("copies")])
    assert moved(one(), noisy, THERE).notices[-2].endswith("a machine that was too noisy: it drifted")
    assert len(found.notices) == 1


def test_from_a_cpu_to_a_gpu():
    here = measured("cpu", 1e9, 1e9, 1e-6)
    found = moved(workload(threads=(1, 2)), here, THERE)
    # Of another type of device only what all cores took counts; nothing was copied there before.
    assert [timing["samples"] for timing in found.timed("eager")] == [32, 64, 128]
    assert line(found, "forward") == pytest.approx((5 * 0.3 * FIXED_S, 0.3 * PER_SAMPLE_S / 4))
    assert line(found, "input")[1] == pytest.approx(0.05 * PER_SAMPLE_S + 3144 / 4e9)


@pytest.mark.parametrize("name", ["8xh100", "8xa100", "64x8xh100"])
def test_to_a_machine_that_is_shipped(name):
    _, there = elsewhere(name)
    found = moved(one(), measured("cuda:0", 5e13, 4e12, 10e-6), there)
    assert found.device_name == there.machine["gpus"][0]
    assert all(timing["seconds"] > 0 for timing in found.timings)


def test_what_was_not_measured_is_named():
    with pytest.raises(UsageError, match="no figure of matrix product in bf16 on cuda:0 of h"):
        moved(one(precision="bf16"), HERE, THERE)
    with pytest.raises(UsageError, match="no figure of memory bandwidth on cuda:0"):
        rates_of(
            replace(HERE, figures=[f for f in HERE.figures if f["name"] != "memory bandwidth"]),
            "cuda:0",
            "fp32",
        )
    sums = [
        {**HERE.figures[0], "name": "elementwise add", "value": rate,
         "parameters": {"device": "cuda:0", "dtype": dtype, "elements": elements}}
        for dtype, elements, rate in (("fp32", 1 << 10, 9e9), ("fp32", 1 << 24, 1e9), ("bf16", 1 << 24, 1.5e9))
    ]  # fmt: skip
    others = [figure for figure in HERE.figures if figure["name"] != "memory bandwidth"]
    # Of the long ones, two vectors are read and one is written.
    assert rates_of(replace(HERE, figures=others + sums), "cuda:0", "fp32").bytes_s == 12e9
    # A CPU has no TF32.
    assert rates_of(measured("cpu", 1e9, 1e9, 1e-6), "cpu", "tf32").flops_s == 1e9
