"""Where the time of a step went, for spans whose answer is known; and the table of it."""

import random

import pytest

from kway.report.intervals import union
from kway.report.timeline import PARTS, Activities, activities, lines_of, parts


def event(kind, name, begin, end):
    return {"ph": "X", "cat": kind, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6}


def test_each_moment_belongs_to_one_part():
    found = parts([(0, 10)], Activities([(1, 4)], [(3, 6)], [(5, 8)]))
    assert found == {
        "compute_s": 3,
        "exposed_communication_s": 2,
        "hidden_communication_s": 1,
        "input_wait_s": 2,
        "idle_s": 3,
    }


def test_what_lies_outside_of_the_windows_does_not_count():
    everything = [(-5.0, 50.0)]
    found = parts([(0, 1), (20, 22)], Activities(everything, everything, everything))
    assert [found[name] for name in PARTS] == [3, 0, 0, 0]
    assert found["hidden_communication_s"] == 3
    assert parts([(0, 1), (20, 22)], Activities())["idle_s"] == 3


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up(seed):
    random.seed(seed)

    def drawn():
        begins = [random.uniform(-1, 11) for _ in range(30)]
        return union((begin, begin + random.expovariate(4)) for begin in begins)

    found = parts([(0, 4), (5, 10)], Activities(drawn(), drawn(), drawn()))
    assert sum(found[name] for name in PARTS) == pytest.approx(9, rel=1e-12)
    assert 0 < found["hidden_communication_s"] < found["compute_s"]


def test_on_a_gpu_kernels_and_copies_count_and_not_what_the_host_does():
    events = [
        event("cpu_op", "aten::mm", 0, 9),
        event("cuda_runtime", "cudaGraphLaunch", 0, 9),
        event("gpu_user_annotation", "step", 0, 9),
        event("kernel", "sm90_gemm", 1, 2),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)", 1.5, 3),
        event("gpu_memset", "Memset (Device)", 3, 3.5),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 4, 5),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 6),
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
    ]
    found = activities(events, [], [(7, 8)], on_gpu=True)
    assert found == Activities([(1, 2), (3, 3.5)], [(1.5, 3), (4, 5)], [(5, 6), (7, 8)])
    assert parts([(0, 10)], found) == pytest.approx(
        {
            "compute_s": 1.5,
            "exposed_communication_s": 2,
            "hidden_communication_s": 0.5,
            "input_wait_s": 2,
            "idle_s": 4.5,
        }
    )


def test_on_a_cpu_an_operation_that_waits_or_reads_does_not_compute():
    events = [
        # A hook of backward begins a collective and then waits for another.
        event("cpu_op", "autograd::engine::evaluate_function: AccumulateGrad", 0, 4),
        event("cpu_op", "c10d::allreduce_", 1, 2),
        event("user_annotation", "gloo:all_reduce", 1, 5),
        event("user_annotation", "Optimizer.step#SGD.step", 5, 9),
        event("cpu_op", "aten::add", 6, 7),
        event("cpu_op", "aten::index", 8, 9),
    ]
    found = activities(events, [(3, 3.5)], [(8, 9.5)], on_gpu=False)
    assert found == Activities([(0, 1), (2, 3), (3.5, 4), (6, 7)], [(1, 5)], [(8, 9.5)])
    assert parts([(0, 10)], found) == {
        "compute_s": 3.5,
        "exposed_communication_s": 2.5,
        "hidden_communication_s": 1.5,
        "input_wait_s": 1.5,
        "idle_s": 2.5,
    }


def test_the_table_has_a_row_for_each_rank():
    names = ("step_s", *PARTS, "hidden_communication_s")
    rows = [{"rank": rank, **dict.fromkeys(names, 0.001 * (rank + 1))} for rank in (0, 1)]
    said, table = lines_of({"steps": [7, 8], "clock": "one clock", "ranks": rows})
    assert said == "timeline   2 steps from 7 to 8, as the profiler saw them; ranks aligned by one clock"
    head, *body = table.splitlines()
    assert head.split()[:3] == ["rank", "ms", "a"]
    assert [line.split() for line in body] == [["0", *["1.00"] * 6], ["1", *["2.00"] * 6]]
    (only, _) = lines_of({"steps": [7], "clock": "one clock", "ranks": rows})
    assert only.startswith("timeline   1 step, 7, as")
