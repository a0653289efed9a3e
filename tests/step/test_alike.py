"""What counts as the same where it is put anew between two steps, or in each of them."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tests.step.recorded import Net, Scaled, opened, share
from tests.step.test_contents import closing, looking

from kway.step.alike import alike


class Pair(NamedTuple):
    one: float
    other: str


class Owner:
    def steps(self):
        return 0


OWNER = Owner()
ANEW = {
    "tuple": lambda: (1, "a" * 3, 2.5),
    "list": lambda: [1, (2.5, 10**5000)],
    "NaN": lambda: [float("nan")],
    "shape": lambda: torch.zeros(300, 301).shape,
    "named tuple": lambda: Pair(1.5, "a"),
    "dict": lambda: {"a": [1.5]},
    "device": lambda: torch.device("cpu"),
    "partial": lambda: partial(closing, 2.5),
    "method": lambda: OWNER.steps,
    "scalar": lambda: np.float32(1.5),
    "integer of NumPy": lambda: [np.int64(1000)],
    "set": lambda: {1, 2.5, "a" * 3},
    "range": lambda: range(0, 1000, 3),
    "slice": lambda: (slice(0, 1000), slice(None, 2.5)),
}


@pytest.mark.parametrize("make", ANEW.values(), ids=ANEW)
def test_an_equal_value_put_anew_is_no_change(make):
    engine, graphed, recorder = opened(Scaled(), optimizer=partial(torch.optim.SGD, lr=0.1))
    engine.model.own, engine.model.table = make(), {"own": make()}
    for step in range(20):
        engine.model.own = engine.model.table["own"] = make()
        graphed.run(share(step), step)
    assert [made.replays for made in recorder.made] == [17]


class Shaped(Net):
    """Keeps what it met last, as many a model does."""

    def forward(self, x):
        self.last, self.sizes = x.shape, {"rows": len(x), "at": (x.device, x.shape)}
        return self.inner(x).reshape(self.last[0], -1)


def test_a_model_that_keeps_the_same_of_each_batch_is_recorded():
    _, graphed, recorder = opened(Shaped(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(6):
        graphed.run(share(step), step)
    assert graphed.notices == []
    assert [made.replays for made in recorder.made] == [3]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([0.0], [-0.0]),
        ({"a": 1}, {"b": 1}),
        (Pair(1, "a"), (1, "a")),
        ((1,), (2,)),
        ([1], [True]),
        (np.float32(1), np.float32(3)),
        (1, 1.0),
    ],
)
def test_another_value_put_anew_is_a_change(one, other):
    held = {"own": one}
    look = looking(held)
    held["own"] = other
    assert not look.unchanged()
    assert look.change() == "['own']"


def test_a_list_put_anew_is_followed_as_the_one_before():
    held = {"own": [1.0]}
    look = looking(held)
    held["own"] = [1.0]
    assert look.unchanged()
    held["own"][0] = 3.0
    assert not look.unchanged()


def test_containers_that_lie_in_each_other_many_times_over_are_given_up():
    def nested():
        entry = [1.0]
        for _ in range(4):
            entry = [entry] * 250
        return entry

    # All of them would be four thousand million numbers.
    assert not alike(nested(), nested())
    assert alike([[1.0] * 60] * 60, [[1.0] * 60] * 60)
