"""When a device had nothing to do, by a double that works through what it was given in its own time."""

import pytest
import torch
from tests.training.device import Device

from kway.training.idle import DeviceIdle, HostIdle, idle_of


def idle_after(steps, device):
    """Let the host read for ``steps[n][0]`` seconds, then give work of ``steps[n][1]``, which takes no host time."""
    idle = DeviceIdle(device.point)
    for read, work in steps:
        idle.wait_begins()
        device.now += read
        idle.wait_ends(read)
        device.work(work)
    assert device.waits == 0
    return idle.seconds()


@pytest.mark.parametrize(
    ("steps", "idle"),
    [
        ([(1.0, 5.0)], 1.0),  # nothing to do before the first batch
        ([(1.0, 5.0), (2.0, 5.0), (2.0, 5.0)], 1.0),  # read while the device was at work
        ([(1.0, 2.0), (3.0, 2.0), (3.0, 2.0)], 1.0 + 1.0 + 1.0),  # dry for the last second of each
        ([(0.5, 0.0)] * 40, 20.0),  # work that takes no time: always dry
        ([(0.0, 1.0)] * 40, 0.0),
    ],
)
def test_only_the_time_without_work_counts(steps, idle):
    device = Device()
    assert idle_after(steps, device) == pytest.approx(idle)


def test_at_most_the_time_waited_counts():
    device = Device()
    idle = DeviceIdle(device.point)
    idle.wait_begins()
    device.now += 10.0  # between the end of the step and the question for a batch the host did other things
    idle.wait_ends(0.5)
    assert idle.seconds() == pytest.approx(0.5)


def test_points_are_used_again():
    device = Device()
    idle_after([(0.5, 0.1)] * 100, device)
    assert device.points <= 4


def test_a_cpu_is_idle_whenever_it_waits():
    idle = idle_of(torch.device("cpu"))
    assert isinstance(idle, HostIdle)
    for waited in (0.5, 0.25):
        idle.wait_begins()
        idle.wait_ends(waited)
    assert idle.seconds() == 0.75
