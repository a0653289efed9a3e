"""What is hidden by doing two things at once: from known times, and measured in small."""

import pytest
import torch

from kway.jobs.kept_ranks import KeptRanks
from kway.measuring import copy_out, two_devices, under_collective
from kway.measuring.bench import Bench
from kway.measuring.experiment import experiments
from kway.measuring.figure import Maker
from kway.measuring.hidden import hidden_figure, share, slowdown, slowdown_figure
from kway.measuring.timer import Policy
from kway.measuring.under_collective import repeats

# So many seconds that nothing is left out, however slow the machine is just now.
SMALL = Policy(seconds=1e6, sample_s=1e-4, rounds=3, tries=1)
SIZES = {
    "n": (64, 128), "n_cpu": (8, 16), "n_copied": (64, 128), "beside": (64, (1 << 12, 1 << 16)),
    "beside_cpu": (16, (1 << 8, 1 << 12)),
}  # fmt: skip


def timed(name, parameters, seconds):
    return Maker("overlap").timed(name, parameters, "s", [seconds])


@pytest.mark.parametrize(("both", "hidden"), [(3.0, 1.0), (5.0, 0.0), (4.0, 0.5), (6.0, -0.5)])
def test_the_share_of_the_shorter_that_was_hidden(both, hidden):
    assert share(3.0, 2.0, both) == share(2.0, 3.0, both) == hidden
    assert slowdown(2.0, 3.0) == 1.5


def test_the_figure_of_a_share_is_as_uncertain_as_the_times_it_is_made_of():
    first, second, both = (timed("x", {}, seconds) for seconds in (3.0, 2.0, 4.0))
    found = hidden_figure(Maker("overlap"), "hidden", {"n": 4}, first, second, both)
    assert (found.value, found.unit) == (50.0, "%")
    # Each time is known to 1%: (0.03^2 + 0.02^2 + 0.04^2)^0.5 / 2 of 0.5.
    assert found.spread == pytest.approx(0.0539, abs=1e-4)
    assert hidden_figure(Maker("overlap"), "hidden", {}, first, second, timed("x", {}, 5.0)).spread is None
    slower = slowdown_figure(Maker("overlap"), "slowdown", {}, second, both)
    assert (slower.value, slower.spread) == (2.0, pytest.approx(0.01414, abs=1e-5))


def test_as_many_collectives_as_take_about_as_long():
    assert [repeats(1e-2, 3e-3), repeats(1e-3, 1.0), repeats(1.0, 1e-6), repeats(1.0, 0.0)] == [4, 1, 256, 1]


def test_each_way_of_copying_is_compared_with_the_copies_that_it_makes():
    bench = Bench("overlap", ("cpu", "cuda:0"), SIZES, SMALL)
    bench.time([], "cpu", 0.1)
    times = {
        copy_out.COMPUTE: 2.0, copy_out.PAGEABLE_COPY: 8.0, copy_out.PINNED_COPY: 1.0, copy_out.IN_TURN: 10.0,
        copy_out.NON_BLOCKING: 9.0, copy_out.PINNED: 3.0, copy_out.SIDE: 2.1,
    }  # fmt: skip
    figures = [timed(copy_out.NAME, {"way": way, "n": 64}, seconds) for way, seconds in times.items()]
    found = {figure.parameters["way"]: figure.value for figure in copy_out.compared(bench, figures)}
    assert found == {
        copy_out.IN_TURN: 0.0, copy_out.NON_BLOCKING: 50.0, copy_out.PINNED: 0.0, copy_out.SIDE: pytest.approx(90.0),
    }  # fmt: skip


def test_where_launching_takes_the_time_is_said():
    times = {(copy_out.SIDE, 500): 1.08e-3, (copy_out.LAUNCHED, 500): 1.0e-3, (copy_out.SIDE, 2000): 6e-3}
    times[copy_out.LAUNCHED, 2000] = 1.0e-3
    figures = [timed(copy_out.NAME, {"way": way, "n": n}, seconds) for (way, n), seconds in times.items()]
    (note,) = copy_out.launch_bound(figures)
    assert "at n = 500 launching takes 1 ms of the 1.08 ms" in note
    assert copy_out.launch_bound(figures[:1]) == []


def test_a_slowdown_is_that_of_the_longer_one_and_of_the_products():
    bench = Bench("overlap", ("cpu",), SIZES, SMALL)
    bench.time([], "cpu", 0.1)
    times = dict(zip(under_collective.WAYS, (2.0, 3.0, 3.6, 2.5), strict=True))
    figures = [
        timed(under_collective.NAME, {"way": way, "n": 8, "bytes": 64}, seconds)
        for way, seconds in times.items()
    ]
    hidden, *slower = under_collective.compared(bench, figures)
    assert hidden.value == pytest.approx(70.0)
    assert [figure.value for figure in slower] == pytest.approx([1.2, 1.25])


def test_the_experiment_measures_cpu_ranks(ranks):
    bench = Bench("overlap", ("cpu",), SIZES, SMALL, cpu_ranks=2, on_ranks=KeptRanks(ranks.of(2)))
    figures = experiments()["overlap"].run(bench)
    assert not any(reading.left for reading in bench.readings)
    found = {
        (figure.name, figure.parameters.get("way"), figure.parameters.get("n")): figure.value
        for figure in figures
    }
    for n in SIZES["n_cpu"]:
        assert {way for name, way, size in found if name == two_devices.NAME and size == n} == set(
            two_devices.WAYS
        )
    assert {way for name, way, _ in found if name == under_collective.NAME} == set(under_collective.WAYS)
    assert sum(figure.name == under_collective.SLOWDOWN for figure in figures) == 4
    assert any("no GPU here" in note for note in bench.notes)


def in_turn(context):
    """Return what a rank multiplied and for whom it waited, in order."""
    from unittest import mock

    order = []
    with mock.patch.object(two_devices, "multiplier", return_value=lambda: order.append("multiply")):
        for way in two_devices.WAYS:
            two_devices.on_rank(context.world, lambda: order.append("meet"), way, 8)()(1)
            order.append(way)
    return order


def test_one_rank_works_after_the_other(ranks):
    first, second = ranks.run(in_turn)
    assert first == ["multiply", "first alone", "second alone", "multiply", "meet", "meet", "one after the other",
                     "multiply", "at once"]  # fmt: skip
    assert second == ["first alone", "multiply", "second alone", "meet", "multiply", "meet", "one after the other",
                      "multiply", "at once"]  # fmt: skip


def test_one_device_has_nothing_to_do_at_once():
    bench = Bench("overlap", ("cpu",), SIZES, SMALL)
    assert experiments()["overlap"].run(bench) == []


def test_what_ranks_take_to_take_turns_is_told():
    times = {two_devices.FIRST: 1e-3, two_devices.SECOND: 2e-3, two_devices.IN_TURN: 3.5e-3}
    figures = [timed(two_devices.NAME, {"way": way, "n": 64}, seconds) for way, seconds in times.items()]
    (note,) = two_devices.meetings(
        [*figures, timed(two_devices.NAME, {"way": two_devices.FIRST, "n": 8}, 1.0)]
    )
    assert note.endswith("meet twice, and take longer than both alone by 500.0 us at n = 64")
    figures[2] = timed(two_devices.NAME, {"way": two_devices.IN_TURN, "n": 64}, 3e-3)
    assert two_devices.meetings(figures) == []


@pytest.mark.gpu
def test_all_ways_are_measured_on_gpus():
    devices = ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count())))
    with KeptRanks() as on_ranks:
        bench = Bench("overlap", devices, SIZES, SMALL, cpu_ranks=2, on_ranks=on_ranks)
        figures = experiments()["overlap"].run(bench)
    assert not any(reading.left for reading in bench.readings)
    assert {figure.parameters["way"] for figure in figures if figure.name == copy_out.HIDDEN} == set(
        copy_out.WAYS
    )
    launches = [figure.value for figure in figures if figure.parameters.get("way") == copy_out.LAUNCHED]
    assert len(launches) == len(SIZES["n_copied"])


@pytest.mark.gpu
def test_results_on_a_side_stream_are_not_copied_before_they_are_there():
    a, b = (torch.randn(512, 512, device="cuda:0") for _ in range(2))
    results = [torch.zeros_like(a) for _ in range(2)]
    hosts = [torch.zeros(512, 512, pin_memory=True) for _ in range(2)]
    copy_out.Beside(a, b, results, hosts)()
    torch.cuda.synchronize()
    for host in hosts:
        assert torch.equal(host, torch.mm(a, b).cpu())
