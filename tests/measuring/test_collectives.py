"""Collectives: that they are what they are called, what their times say, and one real measurement in small."""

import time
from contextlib import nullcontext

import pytest
import torch

from kway.comm.group import Group
from kway.jobs.kept_ranks import KeptRanks
from kway.measuring import behind_work
from kway.measuring.bench import Bench
from kway.measuring.collective_figures import bus_limit, figures_of, lines_of, ratio
from kway.measuring.collective_ranks import Part, parts, task, title
from kway.measuring.collectives import COLLECTIVES, ORDERED, Buffers, bus_factor, elements_of
from kway.measuring.experiment import experiments
from kway.measuring.figure import Maker
from kway.measuring.limits import Limits
from kway.measuring.timer import Policy, Reading, Timing

# So many seconds that nothing is left out, however slow the machine is just now.
SMALL = Policy(seconds=1e6, sample_s=1e-4, rounds=3, tries=1)
SIZES = {
    "bytes_cpu": (64, 1024, 4096), "bytes_gpu": (1 << 12, 1 << 16, 1 << 20), "bytes_gloo": (1 << 12, 1 << 16),
    "cpu_beside_gpus": False, "every_number": True,
}  # fmt: skip


def done(context, elements):
    """Do each collective once over numbers that tell ranks and places apart; return both buffers after it."""
    rank, size = context.world.rank, context.world.size
    found = {}
    for name, (make, _) in COLLECTIVES.items():
        first = torch.arange(elements, dtype=torch.float32) + 100 * rank
        buffers = Buffers(Group(rank, size), first, torch.full((elements,), -1.0))
        returned = make(buffers, elements)()
        found[name] = (returned if name == ORDERED else buffers.first).tolist(), buffers.second.tolist()
    return found


def test_each_does_what_it_is_called(ranks):
    size, elements = 3, 6
    sent = [[float(place + 100 * rank) for place in range(elements)] for rank in range(size)]
    total = [sum(column) for column in zip(*sent, strict=True)]
    for rank, found in enumerate(ranks.run(done, elements, size=size)):
        before = (rank - 1) % size
        assert found["all-reduce"][0] == found[ORDERED][0] == total
        assert found["all-gather"][1] == [value for own in sent for value in own[:2]]
        assert found["reduce-scatter"][1][:2] == total[2 * rank : 2 * rank + 2]
        assert found["all-to-all"][1] == [value for own in sent for value in own[2 * rank : 2 * rank + 2]]
        assert found["broadcast"][0] == sent[0]
        assert found["point to point"][1] == sent[before]


@pytest.mark.parametrize(
    ("size", "factors"), [(2, [1, 0.5, 0.5, 0.5, 1, 1, 1]), (4, [1.5, 0.75, 0.75, 0.75, 1, 1, 1.5])]
)
def test_the_factors_of_bus_bandwidth(size, factors):
    assert [bus_factor(name, size) for name in COLLECTIVES] == factors


def test_what_is_sent_can_be_cut_by_the_ranks():
    assert [elements_of(size, 3) for size in (4, 1024, 1 << 20)] == [3, 255, 262143]
    assert elements_of(1024, 2) * 4 == 1024


def test_all_numbers_of_ranks_and_both_back_ends_come_all_ranks_first():
    assert parts(["gloo"], 2) == [Part("gloo", 2)]
    both = ["nccl", "gloo"]
    assert [(part.backend, part.ranks) for part in parts(both, 4)] == [
        ("nccl", 4), ("gloo", 4), ("nccl", 2), ("gloo", 2), ("nccl", 3), ("gloo", 3),
    ]  # fmt: skip
    assert [(part.backend, part.ranks) for part in parts(both, 8, every=False)] == [
        ("nccl", 8), ("gloo", 8), ("nccl", 2), ("nccl", 4),
    ]  # fmt: skip


def made_up(cost):
    sizes = (1 << 10, 1 << 15, 1 << 20)
    timings = {
        title(name, size): Timing(title(name, size), 1, (cost(name, size),) * 3)
        for name in COLLECTIVES
        for size in sizes
    }
    return sizes, Reading(timings)


def test_times_become_bandwidths_beside_the_limit_of_the_links():
    sizes, reading = made_up(lambda name, size: 2.0)
    part = Part("nccl", 4)
    figures = figures_of(Maker("collectives"), "GPUs", part, reading, sizes, 1e6)
    found = {
        (figure.name, figure.parameters["collective"], figure.parameters["bytes"]): figure
        for figure in figures
    }
    assert len(found) == 3 * 7 * 3
    assert found["time, nccl on 4 GPUs", "all-reduce", 1024].value == 2.0
    assert found["algorithm bandwidth, nccl on 4 GPUs", "all-reduce", 1024].value == 512
    bus = found["bus bandwidth, nccl on 4 GPUs", "all-reduce", 1 << 20]
    assert (bus.value, bus.limit, bus.share) == (1.5 * (1 << 19), 1e6, pytest.approx(0.786432))
    assert found["time, nccl on 4 GPUs", "all-reduce", 1024].limit is None


def test_latency_and_bandwidth_are_fitted():
    sizes, reading = made_up(lambda name, size: 1e-4 + size / 1e9)
    figures = lines_of(Maker("collectives"), "CPU ranks", Part("gloo", 2), reading, sizes)
    assert len(figures) == 2 * 7
    latency, bandwidth = figures[:2]
    assert (latency.value, bandwidth.value) == (pytest.approx(1e-4), pytest.approx(1e9))
    assert latency.spread < 1e-6


def test_what_order_costs_is_said():
    sizes, reading = made_up(lambda name, size: (3.0 if size > 1024 else 1.5) if name == ORDERED else 1.0)
    said = ratio(Part("gloo", 2), reading, sizes)
    assert "1.50 times at 1,024 bytes and 3.00 times at 1,048,576 bytes" in said
    assert ratio(Part("gloo", 2), Reading({}), sizes) == ""


def test_the_limit_of_links_is_known_where_all_have_the_same():
    pairs = {(a, b): 450e9 for a in "012" for b in "012" if a != b}
    bench = Bench("collectives", ("cpu",), SIZES, SMALL, limits=Limits(peer=pairs))
    assert bus_limit(bench, "012") == 450e9
    pairs["0", "1"] = 100e9
    assert bus_limit(bench, "012") is None
    assert bus_limit(bench, "01x") is None


def test_fewer_ranks_are_measured_while_the_others_wait(ranks):
    todo = parts(["gloo"], 3)
    found = ranks.run(task, todo, {"gloo": (64, 4096)}, SMALL, time.time(), size=3)
    assert [[(part.ranks, sorted(reading.left)) for part, reading in each] for each in found] == [
        [(3, []), (2, [])], [(3, []), (2, [])], [(3, [])],
    ]  # fmt: skip
    for _, reading in found[0]:
        assert set(reading.timings) == {title(name, size) for name in COLLECTIVES for size in (64, 4096)}


def test_the_experiment_measures_cpu_ranks(ranks):
    bench = Bench("collectives", ("cpu",), SIZES, SMALL, cpu_ranks=2, on_ranks=KeptRanks(ranks.of(2)))
    figures = experiments()["collectives"].run(bench)
    assert not any(reading.left for reading in bench.readings)
    names = dict.fromkeys(figure.name for figure in figures)
    assert list(names)[:3] == [
        f"{name}, gloo on 2 CPU ranks" for name in ("time", "algorithm bandwidth", "bus bandwidth")
    ]
    assert all(figure.value > 0 for figure in figures if "fitted" not in figure.name)
    assert "an ordered tree reduction takes" in bench.notes[0]


def test_one_device_has_nobody_to_send_to():
    bench = Bench("collectives", ("cpu",), SIZES, SMALL)
    assert experiments()["collectives"].run(bench) == []
    assert "nobody to send to" in bench.notes[0]


@pytest.mark.gpu
def test_nccl_and_gloo_are_measured_on_all_gpus():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    devices = ("cpu", *(f"cuda:{index}" for index in range(count)))
    with KeptRanks() as on_ranks:
        bench = Bench("collectives", devices, SIZES, SMALL, on_ranks=on_ranks)
        figures = experiments()["collectives"].run(bench)
    for backend in ("nccl", "gloo"):
        measured = {
            figure.parameters["collective"] for figure in figures if figure.parameters["backend"] == backend
        }
        assert measured == set(COLLECTIVES)


@pytest.mark.gpu
def test_behind_work_small_collectives_of_gpus_take_less_than_their_launches():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    gpus = tuple(f"cuda:{index}" for index in range(count))
    sizes = {"behind_work": {"all-reduce": (1024, 1 << 20)}, "every_number": False, "cpu_beside_gpus": False}
    with KeptRanks() as on_ranks:
        bench = Bench("beside", ("cpu", *gpus), sizes, SMALL, on_ranks=on_ranks)
        figures = behind_work.run(bench, 1.0)
        [[_, reading], *_] = bench.on(
            list(gpus), 1.0, task, parts(["nccl"], count, False), {"nccl": (1024, 1 << 20)}
        )
    taken = {
        figure.parameters["bytes"]: figure.value for figure in figures if figure.parameters["ranks"] == count
    }
    assert 0 < taken[1024] < taken[1 << 20]
    assert taken[1024] < reading.timings[title("all-reduce", 1024)].seconds


def test_a_collective_behind_work_is_timed_from_when_the_ranks_have_met(monkeypatch):
    """With a double of the GPU's clock and queue."""
    done = []

    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            done.append("clock")

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1.0

    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda place: None)
    monkeypatch.setattr(behind_work, "launched", lambda call, wait: lambda count: 1e-4)
    work = behind_work.queued(lambda: done.append("sum"), lambda: done.append("busy"), "cuda:0")
    # Work of 0.05 ms, eight times: four times as long as the launches.
    assert work(3) == 1e-3
    busy = 8
    assert done[-busy - 6 :] == ["busy"] * busy + ["sum", "clock", "sum", "sum", "sum", "clock"]
    done.clear()
    assert work(behind_work.BURST + 1) == 2e-3
    assert done.count("sum") == behind_work.BURST + 1 + 2
