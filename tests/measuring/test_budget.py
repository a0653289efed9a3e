"""Who may take how many seconds."""

import pytest

from kway.measuring.budget import LEAST, PATIENCE, SLACK, Budget, Purse, Seconds, allowed, expected
from kway.measuring.experiment import experiments

PLANNED = [Budget(cpu=4.0, gpu=6.0), Budget(cpu=0.0, gpu=5.0), Budget(cpu=6.0, gpu=0.0)]


def test_a_machine_without_gpus_has_seconds_of_its_own():
    seconds = Seconds(9.0, cpu=4.0, gpu=5.0, more=0.5)
    assert [seconds.of(0), seconds.of(1), seconds.of(4)] == [Budget(9, 0), Budget(4, 5), Budget(4, 6.5)]


@pytest.mark.parametrize(("left", "cpu"), [(100.0, 4.0), (21.0, 4.0), (16.0, 2.0), (11.0, 1.0), (-9.0, 1.0)])
def test_the_cpu_gets_what_is_left_beside_the_gpus(left, cpu):
    assert allowed(PLANNED, left).cpu == cpu
    assert cpu >= LEAST * PLANNED[0].cpu


@pytest.mark.parametrize(
    ("left", "gpu"), [(100.0, 6 * PATIENCE), (27.0, 12.0), (21.0, 6 * SLACK), (-9.0, 6 * SLACK)]
)
def test_gpus_get_what_was_planned_for_them_however_late_it_is(left, gpu):
    assert allowed(PLANNED, left).gpu == gpu


@pytest.mark.parametrize(("left", "seconds"), [(100.0, 10.0), (16.0, 8.0), (-9.0, 7.0)])
def test_what_is_announced_is_what_there_is_time_for(left, seconds):
    assert expected(PLANNED[0], allowed(PLANNED, left)) == seconds


def test_what_a_set_leaves_those_after_it_may_take():
    purse = Purse(10.0)
    assert purse.share(0.5) == 5.0
    purse.pay(0.5, 1.0)
    assert purse.share(0.25) == pytest.approx(4.5)
    purse.pay(0.25, 20.0)
    assert purse.share(0.25) == 0.0


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_quick_measurement_fits_into_a_minute(gpus):
    planned = [each.budget(True, gpus) for each in experiments().values()]
    gpu, cpu = sum(each.gpu for each in planned), sum(each.cpu for each in planned)
    # 52 s, of which starting takes 18 at most; what the CPU gets at the least is still some of it.
    assert gpu + LEAST * cpu < 52 - 18
    alone = sum(each.budget(True, 0).cpu for each in experiments().values())
    assert alone < 45
