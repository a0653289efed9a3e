"""How long training stood still between two steps, by a double that works through what it was given in its own time."""

import pytest
import torch
from tests.training.device import Device

from kway.training.held import DeviceHeld, HostHeld, held_on


@pytest.mark.parametrize(
    ("stops", "held"),
    [
        # Each: work that is under way, seconds of the host, work that the stop gives to the device.
        ([(0.0, 3.0, 0.0)], [3.0]),  # the device had run dry
        ([(5.0, 3.0, 0.0)], [0.0]),  # hidden by a step that is under way
        ([(2.0, 3.0, 0.0)], [1.0]),  # hidden in part
        ([(5.0, 3.0, 0.5)], [0.5]),  # what the device itself does for it
        ([(2.0, 3.0, 0.5), (9.0, 1.0, 0.25)], [1.5, 0.25]),
    ],
)
def test_only_what_the_steps_lose_counts(stops, held):
    device = Device()
    clock = DeviceHeld(device.point)
    for under_way, host, own in stops:
        device.now = max(device.now, device.busy)
        device.work(under_way)
        clock.begins()
        device.now += host
        device.work(own)
        clock.ends()
    assert device.waits == 0
    assert clock.seconds() == pytest.approx(held)


def test_what_has_passed_of_a_stop_is_known_before_it_ends():
    device = Device()
    clock = DeviceHeld(device.point)
    device.work(5.0)
    clock.begins()
    device.now += 3.0
    assert clock.so_far() == 0.0
    assert device.now == 5.0
    device.now += 2.0
    assert clock.so_far() == pytest.approx(2.0)
    assert clock.ends()() == pytest.approx(2.0)
    assert clock.seconds() == pytest.approx([2.0])


def test_nothing_held_is_an_empty_list_and_waits_for_nothing():
    device = Device()
    assert DeviceHeld(device.point).seconds() == []
    assert device.waits == 0


def test_a_cpu_stands_still_while_the_host_does_something_else():
    clock = held_on(torch.device("cpu"))
    assert isinstance(clock, HostHeld)
    for _ in range(2):
        clock.begins()
        assert 0 <= clock.so_far() <= clock.ends()()
    assert len(clock.seconds()) == 2
    assert all(0 <= seconds < 60 for seconds in clock.seconds())
