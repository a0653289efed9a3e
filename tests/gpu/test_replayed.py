"""Recordings of a GPU follow what a user changes between two steps."""

import pytest
from tests.step.test_replayed import CHANGED, CHANGES, Small, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_two_steps_is_followed_on_a_gpu(one, change):
    check(Small, lambda number, *of: change(*of) if number == CHANGED else None, one)


def test_a_number_on_the_cpu_that_is_written_in_place_is_followed(one):
    check(Small, lambda number, model, _: model.scale.fill_(3.0) if number == CHANGED else None, one)
