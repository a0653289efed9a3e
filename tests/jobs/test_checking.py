"""How long the runs of a check are."""

import pytest

from kway.jobs.checking import LEAST_WINDOWS, MOST_WINDOWS, RUN_S, steps_of
from kway.training.clock import LASTS, WARM_UP, WINDOW


@pytest.mark.parametrize("step_s", [1e-5, 1e-4, 5e-3, 0.1, 3.0])
def test_a_run_has_whole_windows_of_the_clock(step_s):
    on_cpu, on_gpu = (steps_of(step_s, gpu) - WARM_UP for gpu in (False, True))
    assert on_cpu % WINDOW == 0
    assert LEAST_WINDOWS <= on_cpu / WINDOW <= MOST_WINDOWS
    # On a GPU a window lasts a while, however fast steps are: the first of them holds what is recorded.
    assert on_gpu * step_s >= 0.99 * max(LEAST_WINDOWS * max(LASTS, WINDOW * step_s), RUN_S)
