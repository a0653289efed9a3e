"""The traces of all ranks as one, in the form that Perfetto and Chrome read: one process row a rank."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Event = dict[str, Any]
# The first thread row of a rank has what kway itself knows of it.
OWN_ROW = 0
# What the profiler writes about itself, and this package to find its place on the clock.
_LEFT_OUT = ("ProfilerStep#", "kway clock ")
_FLOW = ("s", "t", "f")
_DEVICES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


@dataclass(frozen=True)
class RankTrace:
    """What was recorded of one rank. ``name``: what its row is called; ``events``: Chrome events on the clock that all
    share, in microseconds; ``spans``: (name, begin, end) in seconds, of kway's own row; ``windows``: (begin, end), what
    lies outside of them is left out.
    """

    rank: int
    name: str
    events: list[Event]
    spans: list[tuple[str, float, float]]
    windows: list[tuple[float, float]] = field(default_factory=list)


def merged(traces: Iterable[RankTrace]) -> dict[str, Any]:
    """Return one trace. Time 0 is where the first window begins.

    Threads of the host and streams of a GPU are rows of their rank's process. Numbers of processes, threads and flows
    (arrows from one event to another) are given anew, as they may be the same on several ranks.
    """
    traces = list(traces)
    begin = min((window[0] for trace in traces for window in trace.windows), default=0.0)
    flows: dict[Any, int] = {}
    events = [event for trace in traces for event in _of_rank(trace, begin, flows)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _of_rank(trace: RankTrace, begin: float, flows: dict[Any, int]) -> Iterator[Event]:
    own = {"pid": trace.rank, "tid": OWN_ROW}
    yield _label("process_name", own, name=trace.name)
    yield _label("process_sort_index", own, sort_index=trace.rank)
    yield _label("thread_name", own, name="kway")
    yield _label("thread_sort_index", own, sort_index=-1)
    for name, start, end in trace.spans:
        times = {"ts": (start - begin) * 1e6, "dur": (end - start) * 1e6}
        yield {"ph": "X", "cat": "kway", "name": name, **own, **times}
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace.events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    # What a row is shows in its work, which an arrow to it may come before.
    kept = sorted(
        filter(partial(_is_kept, trace.windows), trace.events), key=lambda event: event["ph"] in _FLOW
    )
    threads: dict[tuple[Any, Any], int] = {}
    for event in kept:
        place = event["pid"], event.get("tid", 0)
        if place not in threads:
            threads[place] = len(threads) + 1
            where = {"pid": trace.rank, "tid": threads[place]}
            yield _label("thread_name", where, name=names.get(place) or _row_name(event))
        moved = {**event, "pid": trace.rank, "tid": threads[place], "ts": event["ts"] - begin * 1e6}
        if event["ph"] in _FLOW:
            key = trace.rank, event.get("cat"), event["id"]
            moved["id"] = flows.setdefault(key, len(flows) + 1)
        yield moved


def _is_kept(windows: list[tuple[float, float]], event: Mapping[str, Any]) -> bool:
    if event["ph"] not in ("X", *_FLOW) or event.get("cat") == "Trace":
        return False
    if str(event["name"]).startswith(_LEFT_OUT):
        return False
    begin, end = event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6
    return any(start <= end and begin <= stop for start, stop in windows)


def _row_name(event: Mapping[str, Any]) -> str:
    kind = "stream" if event.get("cat") in _DEVICES else "thread"
    return f"{kind} {event.get('tid', 0)}"


def _label(what: str, where: Mapping[str, Any], **arguments: Any) -> Event:
    return {"ph": "M", "name": what, **where, "args": arguments}


def clock_shift(events: Iterable[Mapping[str, Any]], marks: Mapping[str, tuple[float, float]]) -> float:
    """Return how many microseconds the clock of ``events`` is ahead of another, which was read around ``marks``.

    ``marks``: the name of an event, and the seconds on the other clock before it began and after it ended. Each bounds
    the shift; the middle between the closest bounds is returned. Raises ``KeyError`` where there is none of them.
    """
    least, most = [], []
    for event in events:
        if event["ph"] == "X" and event.get("cat") == "user_annotation" and event["name"] in marks:
            before, after = marks[event["name"]]
            least.append(event["ts"] + event["dur"] - after * 1e6)
            most.append(event["ts"] - before * 1e6)
    if not least:
        raise KeyError(f"none of {len(marks)} marks, the first of them {next(iter(marks), None)}")
    return float(max(least) + min(most)) / 2
