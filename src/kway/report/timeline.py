"""What the time of recorded steps went into, by rank: from spans on a line of time to parts that add up.

At each moment a rank computes, or only communicates, or only waits for input, or does none of these. What computes and
communicates at once computes, and its communication is hidden.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kway.report.intervals import Spans, both, length, union, without
from kway.report.tables import table
from kway.units import counted, seconds_text

PARTS = ("compute_s", "exposed_communication_s", "input_wait_s", "idle_s")
# What a trace calls a collective where it runs: a kernel or a copy between GPUs, or what a thread of Gloo is at.
_ON_GPU = ("nccl", "memcpy ptop")
_ON_HOST = ("gloo:",)
# Where a trace has what the host does to begin one.
_BEGUN = "c10d::"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_TO_DEVICE = "memcpy htod"


@dataclass(frozen=True)
class Activities:
    """What a rank's device was at, as unions of spans in seconds.

    ``input``: where it had to wait for a batch, or had one copied to it, if it did nothing else.
    """

    compute: Spans = field(default_factory=list)
    communication: Spans = field(default_factory=list)
    input: Spans = field(default_factory=list)


def activities(events: Iterable[Mapping[str, Any]], waits: Spans, input: Spans, on_gpu: bool) -> Activities:
    """Sort the events of a Chrome trace (``ts`` and ``dur`` in microseconds) by what they say of the rank's device.

    ``waits``, ``input``: when the host waited inside a collective and for a batch, in seconds on the same clock. On a
    GPU what counts is when kernels and copies ran, those of recorded steps among them; on a CPU when operations of
    torch ran, without those by which the rank waited, got its input, or began a collective.
    """
    computing: Spans = []
    communicating: Spans = list(waits)
    copied: Spans = list(input)
    held: Spans = []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, name = event.get("cat"), str(event["name"]).lower()
        span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if kind in _KERNELS:
            if name.startswith(_ON_GPU):
                communicating.append(span)
            elif name.startswith(_TO_DEVICE):
                copied.append(span)
            else:
                computing.append(span)
        elif name.startswith(_ON_HOST):
            communicating.append(span)
        elif kind == "cpu_op" and not on_gpu:
            (held if name.startswith(_BEGUN) else computing).append(span)
    if on_gpu:
        return Activities(union(computing), union(communicating), union(copied))
    # An operation may enclose what it waits for, such as a hook of the backward pass that sends.
    elsewhere = union(waits, held, input)
    return Activities(without(union(computing), elsewhere), union(communicating, held), union(copied))


def parts(windows: Spans, found: Activities) -> dict[str, float]:
    """Return what the time of ``windows`` went into, in seconds: ``PARTS``, which add up to it, and
    ``hidden_communication_s``, which lies within compute.
    """
    compute, communication = both(found.compute, windows), both(found.communication, windows)
    exposed = without(communication, compute)
    busy = union(compute, communication)
    waiting = without(both(found.input, windows), busy)
    return {
        "compute_s": length(compute),
        "exposed_communication_s": length(exposed),
        "hidden_communication_s": length(both(communication, compute)),
        "input_wait_s": length(waiting),
        "idle_s": length(without(windows, union(busy, waiting))),
    }


def lines_of(timeline: Mapping[str, Any]) -> list[str]:
    """Return the table of a record's ``timeline``: a row a rank, in milliseconds a step; and what it is of."""
    headings = [
        "rank",
        "ms a step",
        "compute",
        "exposed communication",
        "(hidden)",
        "input wait",
        "idle",
    ]
    order = ("step_s", *PARTS[:2], "hidden_communication_s", *PARTS[2:])
    rows = [[row["rank"], *(f"{row[name] * 1e3:.2f}" for name in order)] for row in timeline["ranks"]]
    steps = _steps_text(timeline["steps"])
    said = f"timeline   {steps}, as the profiler saw them; ranks aligned by {timeline['clock']}"
    return [said, table(headings, rows)]


def _steps_text(steps: Sequence[int]) -> str:
    """Say which steps were recorded: ``5 steps from 7 to 11``."""
    first, last = steps[0], steps[-1]
    return (
        f"{counted(len(steps), 'step')}, {first}"
        if first == last
        else (f"{counted(len(steps), 'step')} from {first} to {last}")
    )


def within_text(seconds: float) -> str:
    """Say how well ranks of several machines are aligned."""
    return f"barriers, within {seconds_text(seconds)}"
