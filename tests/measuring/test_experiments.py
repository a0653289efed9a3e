"""Every experiment in small on what is here, and what is computed from figures that are made up."""

import time

import pytest
import torch

from kway.errors import UsageError
from kway.measuring import in_place
from kway.measuring.bench import Bench, Row
from kway.measuring.budget import Budget
from kway.measuring.experiment import chosen, experiments
from kway.measuring.experiments import compute, copies, offload
from kway.measuring.limits import Limits
from kway.measuring.names import names
from kway.measuring.reference import reference, undisturbed
from kway.measuring.timer import Policy
from kway.measuring.work import each_waited, launched, lazily, waited

# So many seconds that nothing is left out, however slow the machine is just now.
SMALL = Policy(seconds=1e6, sample_s=1e-4, rounds=3)
SIZES = {
    "compute": {"products_cpu": (4, 8), "elements_cpu": (64, 128), "bytes_cpu": 4096, "in_place": (4, 8)},
    "copies": {"bytes_cpu": (64, 128), "beyond_caches": 1 << 28},
}


def bench(name, devices=("cpu",), **more):
    return Bench(name, devices, SIZES.get(name, {}), SMALL, **more)


def test_they_are_found_by_their_files():
    assert list(experiments()) == [each.name for each in chosen(None)]
    assert sorted(experiments()) == names()
    assert [each.name for each in chosen("copies, compute")] == ["compute", "copies"]
    assert [each.name for each in chosen(["copies"])] == ["copies"]
    with pytest.raises(UsageError, match="did you mean 'compute'"):
        chosen("comput")
    with pytest.raises(UsageError, match="no experiment"):
        chosen([])
    with pytest.raises(UsageError, match="only=5: it must name experiments"):
        chosen(5)


def test_what_needs_a_gpu_says_so():
    assert "cuda" in experiments()["offload"].lacks(("cpu",))
    assert not experiments()["offload"].lacks(("cpu", "cuda:0"))


@pytest.mark.parametrize("name", SIZES)
def test_all_candidates_of_a_cpu_are_measured(name):
    given = bench(name)
    figures = experiments()[name].run(given)
    assert figures
    assert not any(reading.left for reading in given.readings)
    assert all(figure.value > 0 and len(figure.raw) == 3 for figure in figures)
    assert len({(figure.name, str(figure.parameters)) for figure in figures}) == len(figures)


def test_compute_knows_every_dtype_and_size():
    figures = experiments()["compute"].run(bench("compute"))
    products = [figure for figure in figures if figure.name == "matrix product"]
    assert {(each.parameters["dtype"], each.parameters["n"]) for each in products} == {
        (dtype, n) for dtype in ("fp64", "fp32", "bf16") for n in (4, 8)
    }
    for each in products:
        assert 1e3 < each.value < 1e13


def test_a_product_is_timed_by_what_it_computes():
    given = bench("compute")
    row = Row("x", {}, lambda count: count * 0.5, "FLOP/s", lambda seconds: 8 / seconds)
    (figure,) = given.measure([row], "cpu", 1.0)
    assert figure.value == 16


def test_work_waits_as_its_clock_says():
    class Device:
        """Launching takes 1, and the work itself 10 more, which a wait waits for."""

        now, busy_until = 0, 0

        def call(self):
            self.now += 1
            self.busy_until = max(self.now, self.busy_until) + 10

        def wait(self):
            self.now = max(self.now, self.busy_until)

        def clock(self):
            return self.now

    device = Device()
    assert waited(device.call, device.wait, device.clock)(5) == 51
    assert each_waited(device.call, device.wait, device.clock)(5) == 55
    assert launched(device.call, device.wait, device.clock, queue=2)(5) == 5


def test_what_is_lazy_is_made_once():
    made = []
    work = lazily(lambda: made.append(1) or float)
    assert not made
    assert [work(2), work(3)] == [2.0, 3.0]
    assert made == [1]


def made_up(name, device, times, **more):
    make = bench("compute").maker()
    return [
        make.timed(name, {"device": device, "n": n, **more}, "s", [seconds]) for n, seconds in times.items()
    ]


def test_where_cpu_and_gpu_cross_and_why_one_clock_is_wrong():
    given = bench("compute", ("cpu", "cuda:0"))
    cpu = made_up(in_place.NAME, "cpu", {10: 1e-4, 100: 1e-2, 1000: 1.0}, clock=in_place.DONE)
    done = made_up(in_place.NAME, "cuda:0", {10: 1e-3, 100: 1e-3, 1000: 1e-1}, clock=in_place.DONE)
    queued = made_up(in_place.NAME, "cuda:0", dict.fromkeys((10, 100, 1000), 1e-3), clock=in_place.QUEUED)
    marks = in_place.compared(given, cpu + done + queued)
    assert [mark.parameters["clock"] for mark in marks] == [in_place.DONE, in_place.QUEUED]
    assert marks[0].value == pytest.approx(10**1.5)
    assert marks[0].parameters["marks"] == in_place.NAME
    assert "100 times less" in given.notes[0]
    assert "1.0 us a launch" in given.notes[0]


def test_a_gpu_that_never_pays_is_said_to():
    given = bench("offload", ("cpu", "cuda:0"))
    figures = made_up(offload.TOTAL, "cpu", {8: 1e-6, 16: 1e-5}) + made_up(
        offload.TOTAL, "cuda:0", {8: 1e-3, 16: 1e-3}
    )
    assert offload.compared(given, "cuda:0", figures) == []
    assert "no less time than the CPU" in given.notes[0]


def test_where_an_offload_pays():
    given = bench("offload", ("cpu", "cuda:0"))
    figures = made_up(offload.TOTAL, "cpu", {8: 1e-4, 16: 1e-2}) + made_up(
        offload.TOTAL, "cuda:0", {8: 1e-3, 16: 1e-3}
    )
    figures += made_up(offload.PARTS, "cuda:0", {16: 2e-4}, part=offload.COPY_IN)
    (mark,) = offload.compared(given, "cuda:0", figures)
    assert mark.value == pytest.approx(8 * 2**0.5)
    assert "copy in 200.0 us" in given.notes[0]


def test_every_way_between_devices_is_copied():
    assert copies.ways(["cpu"]) == [("cpu", "cpu", "pageable")]
    found = copies.ways(["cpu", "cuda:0", "cuda:1"])
    assert ("cuda:1", "cuda:0", "") in found
    assert ("cuda:1", "cpu", "pinned, non-blocking") in found
    assert len(found) == len(set(found)) == 1 + 2 * 7 + 2


ALIKE = {"cuda:1": "cuda:0", "cuda:2": "cuda:0"}
THREE = ("cpu", "cuda:0", "cuda:1", "cuda:2")


def test_one_gpu_of_a_kind_stands_for_others_in_a_quick_measurement():
    pairs = {(f"cuda:{a}", f"cuda:{b}"): 450e9 for a in range(3) for b in range(3) if {a, b} != {1, 2}}
    given = bench("copies", THREE, alike=ALIKE, limits=Limits(peer=pairs))
    taken = copies.chosen(given, (1, 2, 3))
    all_sizes = {way for way, sizes in taken.items() if sizes == (1, 2, 3)}
    # GPUs 1 and 2 have other links between them.
    assert all_sizes == {*copies.ways(["cpu", "cuda:0"]), ("cuda:0", "cuda:1", ""), ("cuda:1", "cuda:2", "")}
    largest = {way for way, sizes in taken.items() if sizes == (3,)}
    assert {way for way in largest if "cpu" in way} == {
        (*ends, copies.NON_BLOCKING)
        for gpu in ALIKE
        for ends in (("cpu", gpu), (gpu, "cpu"))
    }  # fmt: skip
    assert len([way for way in taken if "" in way and way[0] != way[1]]) == 6
    assert "cuda:1, cuda:2: of the kind of cuda:0" in given.notes[0]
    assert set(copies.chosen(bench("copies", THREE), (1,))) == set(copies.ways(THREE))


@pytest.mark.parametrize("name", ["compute", "copies"])
def test_gpus_come_before_the_cpu_and_are_told_after_it(name, monkeypatch):
    order = []

    def measure(given, rows, device, part):
        order.append(device)
        given.time([], "cpu", 0.0)
        return [given.maker().timed(row.name, row.parameters, row.unit, [1.0]) for row in rows]

    monkeypatch.setattr(Bench, "measure", measure)
    sizes = {"products_gpu": (64, 128), "elements_gpu": (64,), "bytes_gpu": 64, "bytes": (64, 128)}
    given = Bench(name, THREE, SIZES[name] | sizes, SMALL, alike=ALIKE)
    figures = experiments()[name].run(given)
    assert set(order) == set(THREE)
    assert "cpu" not in order[: order.index("cpu")]
    assert set(order[order.index("cpu") :]) == {"cpu"}
    told = [each.parameters.get("device", each.parameters.get("from")) for each in figures]
    assert told[0] == "cpu"
    if name == "compute":
        glimpsed = {
            (each.name, each.parameters.get("dtype"))
            for each in figures
            if "cuda:2" in each.parameters.values()
        }
        assert glimpsed == {
            *(("matrix product", dtype) for dtype in compute.GLIMPSE),
            ("memory bandwidth", None),
        }


def test_what_the_cpu_takes_no_gpu_lacks():
    now = [0.0]

    def slow(count):
        now[0] += 100.0 * count
        return 100.0 * count

    given = Bench("x", ("cpu", "cuda:0"), {}, SMALL, clock=lambda: now[0])
    given.spend(Budget(cpu=5.0, gpu=7.0))
    assert given.measure([Row("slow", {}, slow)], "cpu", 0.5) == []
    assert given.time([], "cpu", 0.5).left == {}
    assert given.readings[0].left == {"slow ()": "no time for it in the 2.5 s that there were"}
    assert given.share("cuda:0", 0.5) == 3.5
    assert given.share("cpu", 0.5) == 0.0


def test_the_reference_of_a_cpu_is_the_work_of_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        work = reference("cpu")
        work(100)
        process, thread = time.process_time(), time.thread_time()
        assert work(20_000) > 0
        process, thread = time.process_time() - process, time.thread_time() - thread
    finally:
        torch.set_num_threads(before)
    # Nearly all of the processor's time was that of this thread.
    assert process - thread < 0.2 * process


def test_the_fastest_third_stands_for_the_others():
    seconds = iter([9.0, 2.0, 3.0, 5.0, 4.0, 6.0])
    asked = []
    work = undisturbed(lambda count: asked.append(count) or next(seconds))
    assert (work(30), work(1)) == (6.0, 4.0)
    assert asked == [10] * 3 + [1] * 3


def test_latency_and_bandwidth_of_a_way_stand_beside_its_limit():
    given = bench("copies", ("cpu", "cuda:0"), limits=Limits(host={"cuda:0": 4e9}))
    make = given.maker()
    figures = [
        make.timed("copy", {"bytes": size}, "B/s", [1e-5 + size / 2e9], lambda s, size=size: size / s)
        for size in (1 << 10, 1 << 16, 1 << 22)
    ]
    given.time([], "cpu", 0.1)
    latency, bandwidth = copies.line_of(given, "cpu", "cuda:0", "pinned", figures)
    assert latency.value == pytest.approx(1e-5)
    assert bandwidth.value == pytest.approx(2e9)
    assert bandwidth.share == pytest.approx(0.5)


def test_tf32_is_allowed_for_its_products_alone():
    from kway.measuring.products import with_tf32

    before = torch.backends.cuda.matmul.allow_tf32
    seen = []
    for allowed in (True, False):
        with_tf32(allowed, lambda count: seen.append(torch.backends.cuda.matmul.allow_tf32) or 0.0)(1)
    assert seen == [True, False]
    assert torch.backends.cuda.matmul.allow_tf32 is before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["compute", "copies", "offload"])
@pytest.mark.parametrize("quick", [False, True])
def test_all_candidates_of_a_gpu_are_measured(name, quick):
    sizes = {
        "products_gpu": (64, 128), "elements_gpu": (1 << 12, 1 << 16), "bytes_gpu": 1 << 20, "n": (32, 64),
        "bytes": (1 << 12, 1 << 16, 1 << 20),
    }  # fmt: skip
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    given = Bench(
        name,
        ("cpu", *gpus),
        SIZES.get(name, {}) | sizes,
        SMALL,
        alike=dict.fromkeys(gpus[1:], "cuda:0") if quick else {},
    )
    figures = experiments()[name].run(given)
    assert not [reading.left for reading in given.readings if reading.left]
    assert {"cuda:0"} <= {str(value) for figure in figures for value in figure.parameters.values()}
