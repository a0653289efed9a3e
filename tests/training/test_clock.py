from types import SimpleNamespace

import pytest
import torch

from kway.launch.status import STEP
from kway.training.clock import WARM_UP, WINDOW, StepClock
from kway.training.idle import HostIdle

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    """A clock that moves only when the test says so: ``now.s += 1``."""
    hand = SimpleNamespace(s=100.0)
    monkeypatch.setattr("kway.training.clock.time", SimpleNamespace(perf_counter=lambda: hand.s))
    return hand


def test_windows_leave_out_the_first_steps_and_pauses(now):
    clock = StepClock(CPU)
    clock.resume()
    for step in range(WARM_UP + 2 * WINDOW + 3):
        now.s += 50.0 if step < WARM_UP else 1.0 if step < WARM_UP + WINDOW else 3.0
        clock.step()
        if step == WARM_UP + 4:
            clock.pause()
            now.s += 1000.0
            clock.resume()
    assert clock.windows == pytest.approx([1.0, 3.0])
    assert clock.step_s == pytest.approx(1.0)


def test_what_is_left_out_is_asked_for_only_when_the_window_closes(now):
    clock, asked = StepClock(CPU), []
    clock.resume()
    for step in range(WARM_UP + WINDOW):
        now.s += 1.0
        if step == WARM_UP + 4:
            now.s += 1000.0
            clock.leave_out(lambda: asked.append("first") or 600.0)
            clock.leave_out(lambda: asked.append("second") or 400.0)
        assert asked == []
        clock.step()
    assert asked == ["first", "second"]
    assert clock.windows == pytest.approx([1.0])


def test_what_stopped_the_first_steps_is_no_part_of_a_window(now):
    clock = StepClock(CPU)
    clock.resume()
    for step in range(WARM_UP + WINDOW):
        now.s += 1.0
        if step == 0:
            clock.leave_out(lambda: 500.0)
        clock.step()
    assert clock.windows == pytest.approx([1.0])


def test_while_it_is_paused_there_is_nothing_to_leave_out(now):
    clock = StepClock(CPU)
    clock.resume()
    for step in range(WARM_UP + WINDOW):
        now.s += 1.0
        if step == WARM_UP + 4:
            clock.pause()
            now.s += 1000.0
            clock.leave_out(lambda: 1000.0)
            clock.resume()
        clock.step()
    assert clock.windows == pytest.approx([1.0])


def test_without_a_whole_window_there_is_no_time(now):
    clock = StepClock(CPU)
    clock.resume()
    for _ in range(WARM_UP + WINDOW - 1):
        now.s += 1.0
        clock.step()
    assert clock.step_s is None


def test_a_rank_says_which_step_it_waits_for_and_which_it_takes():
    clock, said = StepClock(CPU), []

    def items():
        for item in "ab":
            said.append((item, clock.status.report()))
            yield item

    for item in clock.waited(items(), steps=4):
        said.append((item, clock.status.report()))
    assert [(item, report.step, report.phase) for item, report in said] == [
        ("a", 5, "input"), ("a", 5, STEP), ("b", 6, "input"), ("b", 6, STEP),
    ]  # fmt: skip


def test_waiting_for_data_is_added_up(now):
    def slow():
        for item in range(3):
            now.s += 0.5
            yield item

    clock = StepClock(CPU)
    found = []
    for item in clock.waited(slow()):
        now.s += 7.0  # the step, which is no waiting
        found.append(item)
    assert found == [0, 1, 2]
    assert clock.input_wait_s == pytest.approx(1.5)


@pytest.fixture
def gpu(now, monkeypatch):
    """A clock on a GPU that is not there, and how often it was waited for."""
    waits = []
    monkeypatch.setattr("kway.training.clock.idle_of", lambda device: HostIdle())
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    return StepClock(torch.device("cuda:0")), waits


@pytest.mark.parametrize(("step_s", "steps"), [(0.001, 250), (0.01, 25), (0.1, WINDOW)])
def test_a_window_on_a_gpu_lasts_a_quarter_of_a_second(now, gpu, step_s, steps):
    clock, waits = gpu
    clock.resume()
    for _ in range(WARM_UP):
        clock.step()
    before = len(waits)
    for _ in range(4 * steps + 7):
        now.s += step_s
        clock.step()
    # The sums of so many small times may end a step early or late.
    assert [round(length, 9) for length in clock.windows] == [step_s] * len(clock.windows)
    assert len(clock.windows) in {3, 4}
    assert len(waits) - before == 2 * len(clock.windows)


def test_a_short_run_on_a_gpu_is_a_window_itself(now, gpu):
    clock, _ = gpu
    clock.resume()
    for _ in range(WARM_UP + WINDOW):
        now.s += 0.001
        clock.step()
        assert clock.step_s is None
    clock.pause()
    assert clock.windows == []
    assert clock.step_s == pytest.approx(0.001)
