import pytest

from kway.errors import UsageError
from kway.records import Plan
from kway.training.spec import Interval, TrainSpec, interval


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (1, Interval(1, "epochs")),
        ("3", Interval(3, "epochs")),
        ("2 epochs", Interval(2, "epochs")),
        ("1epoch", Interval(1, "epochs")),
        ("200steps", Interval(200, "steps")),
        (" 1 step ", Interval(1, "steps")),
    ],
)
def test_intervals(value, read):
    assert interval("validate_every", value) == read


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "", "0", "steps", "2days", None, "-3steps"])
def test_what_is_no_interval(value):
    with pytest.raises(UsageError, match="validate_every="):
        interval("validate_every", value)


def test_when_it_is_time():
    steps, epochs = Interval(3, "steps"), Interval(2, "epochs")
    assert [n for n in range(1, 10) if steps.due(n, None)] == [3, 6, 9]
    assert [n for n in range(1, 7) if epochs.due(n * 10, n)] == [2, 4, 6]
    assert not epochs.due(2, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"steps": -1},
        {"log_every": 0},
        {"epochs": 1.5},
        {"steps": True},
        {"patience": 0},
        # What has a default other than None is not left out by None.
        {"epochs": None},
        {"log_every": None},
        {"patience": None},
    ],
)
def test_counts_that_cannot_work(wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=f"{name}="):
        TrainSpec(job=None, plan=Plan("single", {}, ["cpu"], "math", ""), folder="", **wrong)


def test_counts_that_may_be_left_out():
    spec = TrainSpec(job=None, plan=Plan("single", {}, ["cpu"], "math", ""), folder="", steps=None, keep=None)
    assert (spec.steps, spec.keep) == (None, None)
