"""Devices and figures of a machine that is not here: in the form, and by the names, of what is measured here."""

import pytest

from kway.elsewhere.description import described
from kway.elsewhere.figures import NOTE
from kway.elsewhere.links import counts, seconds
from kway.elsewhere.machine import elsewhere
from kway.measurements import Measurements
from kway.measuring import copy_out, two_devices, under_collective
from kway.measuring.collective_figures import figures_of
from kway.measuring.collective_ranks import Part, title
from kway.measuring.collectives import COLLECTIVES
from kway.measuring.experiments import copies
from kway.measuring.figure import Maker
from kway.measuring.limits import Limits
from kway.measuring.names import names
from kway.measuring.products import bandwidth, elementwise, launches, products
from kway.measuring.timer import Reading, Timing
from kway.report.measured import lines_of


@pytest.fixture(scope="module", params=["8xh100", "8xa100", "64x8xh100"])
def machine(request):
    return described(request.param), *elsewhere(request.param)


def shapes(figures):
    """The names of figures, with those of their parameters."""
    return {(figure["name"], *sorted(figure["parameters"])) for figure in figures}


def test_devices(machine):
    described_, cluster, measurements = machine
    assert len(cluster.gpus) == described_.total == len(measurements.devices)
    assert [gpu["index"] for gpu in cluster.gpus] == list(range(described_.total))
    assert {gpu["node"] for gpu in cluster.gpus} == set(range(described_.nodes))
    assert {gpu["memory_total"] for gpu in cluster.gpus} == {80_000_000_000}
    nodes = {gpu["index"]: gpu["node"] for gpu in cluster.gpus}
    assert all(nodes[link["a"]] == nodes[link["b"]] for link in cluster.links)
    each = described_.gpus * (described_.gpus - 1) // 2
    assert len(cluster.links) == described_.nodes * each
    assert cluster.backends["cuda"]["name"] == "nccl"
    assert "an estimate" in cluster.warnings[0]


def test_every_figure_says_that_it_is_an_estimate(machine):
    _, _, measurements = machine
    assert measurements.is_estimate
    assert all(NOTE in figure["notes"] and figure["raw"] == [] for figure in measurements.figures)
    assert all(figure["share"] is None or 0 < figure["share"] <= 1 + 1e-9 for figure in measurements.figures)
    how = {entry["name"]: entry["how"] for entry in measurements.experiments}
    assert how.keys() == set(names())
    assert {name for name, each in how.items() if each == "left"} == {"offload", "beside", "processes"}
    assert any("data sheet" in line for line in measurements.notices)


def test_a_record_like_any_other(machine, tmp_path):
    _, _, measurements = machine
    assert Measurements.load(measurements.save(tmp_path)) == measurements
    lines = lines_of(measurements)
    assert "compute: estimated, not measured" in lines
    assert "offload: not measured: it needs the machine itself" in lines


def test_names_of_compute_and_copies_are_those_of_measuring(machine):
    _, _, measurements = machine
    rows = [
        *products("cuda:0", [64], Limits()),
        *elementwise("cuda:0", [64], Limits()),
        *launches("cuda:0"),
        *bandwidth("cuda:0", 64, Limits()),
    ]
    expected = {(row.name, *sorted(row.parameters)) for row in rows}
    assert shapes(f for f in measurements.figures if f["experiment"] == "compute") == expected
    ways = [way for way in copies.ways(["cpu", "cuda:0", "cuda:1"]) if way[:2] != ("cpu", "cpu")]
    for way in ways:
        at = copies.parameters(*way)
        assert measurements.find("copies", copies.NAME, **at)
        assert len(measurements.find("copies", "copy bandwidth", **at)) == 1


def test_names_of_overlap_are_those_of_measuring(machine):
    _, _, measurements = machine
    found = shapes(f for f in measurements.figures if f["experiment"] == "overlap")
    rows = [*two_devices.rows([64]), *under_collective.rows([64], 64)]
    expected = {(row.name, *sorted(row.parameters)) for row in rows}
    expected |= {(copy_out.NAME, "n", "way"), (copy_out.HIDDEN, "n", "way"), (two_devices.HIDDEN, "n")}
    expected |= {(under_collective.HIDDEN, "bytes", "n"), (under_collective.SLOWDOWN, "bytes", "n", "of")}
    assert found == expected
    ways = {
        figure["parameters"]["way"] for figure in measurements.find("overlap", copy_out.NAME)
    } - copy_out.WAYS.keys()
    assert ways == {copy_out.COMPUTE, copy_out.PAGEABLE_COPY, copy_out.PINNED_COPY}


def test_names_of_collectives_are_those_of_measuring(machine):
    described_, _, measurements = machine
    for ranks in (2, described_.total):
        part = Part("nccl", ranks)
        for collective in COLLECTIVES:
            for size in (1 << 10, 1 << 30):
                at = {"collective": collective, "backend": "nccl", "ranks": ranks, "bytes": size}
                (time,) = measurements.find("collectives", f"time, nccl on {ranks} GPUs", **at)
                assert time["value"] == seconds(described_, collective, ranks, size)
                candidate = title(collective, size)
                reading = Reading({candidate: Timing(candidate, 1, (time["value"],))})
                same = figures_of(Maker("collectives"), "GPUs", part, reading, [size], None)
                for figure in same:
                    (own,) = measurements.find("collectives", figure.name, **figure.parameters)
                    assert own["value"] == pytest.approx(figure.value)
                    assert (own["unit"], own["parameters"]) == (figure.unit, figure.parameters)
    fits = measurements.find("collectives", "fitted bandwidth, nccl on GPUs", collective="all-reduce")
    assert [fit["parameters"]["ranks"] for fit in fits] == counts(described_)[::-1]


def test_figures_by_hand():
    _, measurements = elsewhere("8xh100")

    def value(experiment, name, **parameters):
        (figure,) = measurements.find(experiment, name, **parameters)
        return figure["value"]

    rate = 0.72 * 989.4e12
    assert value("compute", "matrix product", dtype="bf16", n=8192) == pytest.approx(
        2 * 8192**3 / (5e-6 + 2 * 8192**3 / rate)
    )
    pinned = {"from": "cpu", "to": "cuda:3", "memory": "pinned, non-blocking"}
    assert value("copies", "copy", bytes=1 << 26, **pinned) == pytest.approx(
        2**26 / (6e-6 + 2**26 / (0.84 * 63e9))
    )
    pageable = {"from": "cuda:3", "to": "cpu", "memory": "pageable"}
    assert value("copies", "copy latency", **pageable) == pytest.approx(16e-6)
    assert value("copies", "copy bandwidth", **pageable) == pytest.approx(10e9)
    # 24 of 132 multiprocessors are the collective's.
    at = {"bytes": 1 << 26}
    assert value("overlap", "slowdown beside an all-reduce", of="products", **at) == pytest.approx(132 / 108)
    one = value("overlap", two_devices.NAME, way=two_devices.FIRST, n=4000)
    assert one == pytest.approx(50 * (5e-6 + 2 * 4000**3 / (0.75 * 67e12)))
    assert value("overlap", two_devices.HIDDEN, n=4000) == pytest.approx(100.0)
    copied = {way: value("overlap", copy_out.NAME, way=way, n=4000) for way in (
        copy_out.COMPUTE, copy_out.PINNED_COPY, copy_out.SIDE)}  # fmt: skip
    shorter, longer = sorted((copied[copy_out.COMPUTE], copied[copy_out.PINNED_COPY]))
    assert copied[copy_out.SIDE] == pytest.approx(longer + shorter / 16)
    assert value("overlap", copy_out.HIDDEN, way=copy_out.SIDE, n=4000) == pytest.approx(100 * 15 / 16)
    assert value("overlap", copy_out.HIDDEN, way=copy_out.PINNED, n=4000) == pytest.approx(0.0, abs=1e-9)
