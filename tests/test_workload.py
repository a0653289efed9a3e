"""The record of a workload: what it returns, and what it refuses."""

import copy
from pathlib import Path
from typing import Any

import pytest
from tests.workloads import FIXED_S, PER_SAMPLE_S, workload

from kway.errors import UsageError
from kway.workload import Workload


def test_a_workload_comes_back_from_its_file(tmp_path: Path) -> None:
    made = workload(threads=(1, 2))
    made.save(tmp_path)
    assert Workload.load(tmp_path) == made


def test_timings_are_found_by_part_and_threads_smaller_shares_first() -> None:
    made = workload((128, 32, 64), threads=(2, 1))
    assert [timing["samples"] for timing in made.timed("eager", threads=2)] == [32, 64, 128]
    assert made.timed("eager", "step", 2)[0]["seconds"] == FIXED_S + 32 * PER_SAMPLE_S
    assert made.timed("graph") == []
    assert made.step_kinds() == ["eager"]
    assert made.fit("eager", "step", 1)["per_sample_s"] == PER_SAMPLE_S  # type: ignore[index]
    assert made.fit("eager", "step", 3) is None


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("timings", 0, "part"), "sideways", "timings[0]: part is 'sideways'"),
        (("timings", 0, "seconds"), float("nan"), "timings[0]: seconds is nan"),
        (("timings", 0, "samples"), 0, "timings[0]: samples is 0"),
        (("timings", 0, "threads"), True, "timings[0]: threads is True"),
        (("fits", 0, "per_sample_s"), -1.0, "fits[0]: per_sample_s is -1.0"),
        (("fits", 0, "step_kind"), "graph", "fits[0] is of what no timing is of"),
        (("layers", 0, "bound"), "luck", "layers[0]: bound is 'luck'"),
        (("layers", 0, "forward"), {"fixed_s": 0.0}, "layers[0].forward: per_sample_s is missing"),
        (("collectives", 0, "what"), "scatter", "collectives[0]: what is 'scatter'"),
        (("parameters", "tied"), None, "parameters: tied is None"),
        (("memory", "peak"), [{"samples": 1}], "memory.peak[0]: step_kind is missing"),
        (("gradients", "float32"), 1.5, "gradients: float32 is 1.5"),
        (("step_kinds_left", "eager"), "slow", "eager is timed and left out"),
        (("batch_size",), 0, "batch_size is 0"),
        (("timings",), {}, "timings is a dict, not a list"),
    ],
)
def test_what_is_not_of_the_form_is_refused(path: tuple[Any, ...], value: Any, said: str) -> None:
    data = copy.deepcopy(workload().to_dict())
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UsageError) as refused:
        Workload.from_dict(data)
    assert said in str(refused.value)
