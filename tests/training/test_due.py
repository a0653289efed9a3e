"""What is due after a step of a run, and after an epoch."""

import pytest

from kway.records import Plan
from kway.training.due import Agenda
from kway.training.spec import Interval, TrainSpec

PLAN = Plan("single", {}, ["cpu"], "math", "")


def agenda(steps_of_an_epoch=5, **options):
    spec = TrainSpec(job=None, plan=PLAN, folder="", **{"epochs": 3, "log_every": 100, **options})
    return Agenda(spec, lambda epoch: steps_of_an_epoch)


def steps_with(found, what, epochs=3, each=5):
    """The steps of the run, from 1, after which ``what`` is due."""
    return [
        epoch * each + step + 1
        for epoch in range(epochs)
        for step in range(each)
        if getattr(found.after_step(epoch, step, epoch * each + step + 1), what)
    ]


@pytest.mark.parametrize(
    ("options", "what", "steps"),
    [
        ({}, "logs", []),
        ({"log_every": 4}, "logs", [4, 8, 12]),
        ({"steps": 7}, "logs", [7]),
        ({}, "ends_epoch", [5, 10, 15]),
        ({}, "ends", [15]),
        ({"steps": 7}, "ends", [7, 15]),
        ({"steps_of_an_epoch": None}, "ends", []),
        ({"validate_every": Interval(4, "steps")}, "validates", [4, 8, 12]),
        ({"validate_every": Interval(1, "epochs")}, "validates", []),
        ({"checkpoint_every": Interval(6, "steps")}, "saves", [6, 12]),
        ({"checkpoint_every": Interval(1, "epochs")}, "saves", []),
        ({"checkpoint_every": Interval(6, "seconds")}, "saves", []),
        ({}, "looks", [5, 10, 15]),
        ({"log_every": 1}, "looks", [5, 10, 15]),
        ({"steps": 7, "validate_every": Interval(4, "steps")}, "looks", [4, 5, 7, 8, 10, 12, 15]),
        ({"steps_of_an_epoch": None, "checkpoint_every": Interval(6, "steps")}, "looks", [6, 12]),
    ],
)
def test_what_is_due_after_a_step(options, what, steps):
    assert steps_with(agenda(**options), what) == steps


@pytest.mark.parametrize(
    ("every", "validates", "saves"),
    [
        (Interval(2, "epochs"), [1, 3], [1, 3]),
        # A save is due after the step itself, of which no epoch ends; so that a validation may be.
        (Interval(10, "steps"), [1, 3], []),
        (Interval(6, "seconds"), None, []),
    ],
)
def test_what_is_due_after_an_epoch(every, validates, saves):
    found = agenda(checkpoint_every=every)
    assert [epoch for epoch in range(4) if found.saves_after(epoch)] == saves
    if validates is not None:
        found = agenda(validate_every=every)
        assert [epoch for epoch in range(4) if found.validates_after(epoch, 5 * (epoch + 1))] == validates
    assert not any(agenda().saves_after(epoch) for epoch in range(4))
