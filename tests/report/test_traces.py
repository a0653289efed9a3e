"""Traces of several ranks as one."""

import pytest

from kway.report.traces import RankTrace, clock_shift, merged


def events_of(pid, begin):
    """An operation on the host and a kernel of it, an arrow between them, and what is to be left out. Microseconds."""
    host, stream = {"pid": pid, "tid": pid}, {"pid": 0, "tid": 7}
    return [
        {"ph": "M", "name": "process_name", **host, "ts": begin, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", **host, "ts": begin, "args": {"name": "thread (python)"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler",
         "ts": begin, "dur": 9},
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", **host, "ts": begin, "dur": 90},
        {"ph": "X", "cat": "user_annotation", "name": "kway clock 0", **host, "ts": begin + 1, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", **host, "ts": begin + 10, "dur": 5},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, **host, "ts": begin + 11},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 3, **stream, "ts": begin + 20, "bp": "e"},
        {"ph": "X", "cat": "kernel", "name": "gemm", **stream, "ts": begin + 20, "dur": 30},
        {"ph": "X", "cat": "cpu_op", "name": "aten::late", **host, "ts": begin + 200, "dur": 5},
    ]  # fmt: skip


def trace_of(rank, begin_s):
    window = begin_s, begin_s + 100e-6
    spans = [("step 7", *window)]
    return RankTrace(rank, f"rank {rank} (cuda:0)", events_of(40 + rank, begin_s * 1e6), spans, [window])


def test_a_rank_is_one_process_with_rows_of_its_own():
    events = merged([trace_of(0, 1.0), trace_of(1, 1.00001)])["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {0: "rank 0 (cuda:0)", 1: "rank 1 (cuda:0)"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [rows[1, number] for number in range(3)] == ["kway", "thread (python)", "stream 7"]
    assert len(rows) == 6
    assert {e["pid"] for e in events} == {0, 1}
    assert {e["name"] for e in events if e["ph"] == "X"} == {"step 7", "aten::mm", "gemm"}


def test_times_begin_with_the_first_window_and_arrows_stay_within_their_rank():
    events = merged([trace_of(0, 1.0), trace_of(1, 1.00001)])["traceEvents"]
    begun = {(e["pid"], e["name"]): e["ts"] for e in events if e["ph"] == "X"}
    assert begun[0, "step 7"] == 0
    assert begun[1, "step 7"] == pytest.approx(10, abs=1e-3)
    assert begun[0, "gemm"] == pytest.approx(20, abs=1e-3)
    assert begun[1, "gemm"] == pytest.approx(30, abs=1e-3)
    ends = {ph: [(e["pid"], e["id"]) for e in events if e["ph"] == ph] for ph in "sf"}
    assert ends["s"] == ends["f"]
    assert len(dict(ends["s"])) == len({flow for _, flow in ends["s"]}) == 2


def test_the_closest_bounds_say_how_far_a_clock_is_ahead():
    def mark(number, begin, end):
        name = f"kway clock {number}"
        return {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin}

    # 5 s ahead. The first bounds it from below by 4.999990 s, the second from above by 5.000020 s.
    events = [mark(0, 6_000_300, 6_000_490), mark(1, 7_000_020, 7_000_300), {"ph": "M", "name": "x"}]
    marks = {"kway clock 0": (1.0, 1.0005), "kway clock 1": (2.0, 2.0005)}
    assert clock_shift(events, marks) == pytest.approx(5_000_005, abs=1e-3)
    with pytest.raises(KeyError, match="kway clock 9"):
        clock_shift(events, {"kway clock 9": (1.0, 2.0)})
