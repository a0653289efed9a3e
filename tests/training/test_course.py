"""The seconds of an epoch, without pauses and saves."""

from kway.step.tally import Tally
from kway.training.course import Course

TALLY = Tally([], "cpu")


def test_seconds_are_those_between_pauses_without_stops():
    course = Course(TALLY, seconds=5.0)
    assert course.passed(100.0) == 5.0  # it has not begun
    course.since = 100.0
    course.stops.append(lambda: 0.5)
    assert course.passed(103.0) == 7.5
    course.stops.append(lambda: 0.25)
    course.pause(104.0)
    assert (course.seconds, course.since, course.stops) == (8.25, None, [])
    assert course.passed(1000.0) == 8.25
    course.since = 1000.0
    course.pause(1001.0)
    assert course.seconds == 9.25
