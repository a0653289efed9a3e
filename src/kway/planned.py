"""The record of every layout that was priced for a job, ranked, with what speaks for and against each: plan.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kway.errors import UsageError
from kway.forms import AtLeast, Maybe
from kway.records import Record
from kway.workload import IDENTITY

# By which part candidates differ whose order no prediction can tell, however good those before were.
CLOSE = 0.03

# By which part at most, however far those before were off: candidates rest on the same times, and what is wrong with
# these is wrong for all. One run that met a busy moment may be off by any factor, and tells little of their order.
CLOSE_AT_MOST = 0.5

# By which part of a step the terms may miss its time: they are its terms, and only rounding lies between.
ROUNDING = 1e-6

_COUNT, _SECONDS = AtLeast(1, int), AtLeast(0)
_ERRORS: dict[str, Any] = {"checks": AtLeast(0, int), "mean_error": (AtLeast(0), None)}
_FORMS: dict[str, Any] = {
    "candidates": [
        {
            "strategy": str, "devices": _COUNT, "device_set": list[str], "layout": dict[str, int], "step_kind": str,
            "batch_size": _COUNT, "step_s": _SECONDS, "terms": {str: _SECONDS}, "memory_bytes": AtLeast(0, int),
            "memory": Maybe(dict[str, float]), "room_bytes": Maybe((AtLeast(0, int), None)), "fits": bool,
            "missing_bytes": AtLeast(0, int), "eligible": Maybe(bool), "doubtful": Maybe(bool),
            "samples_per_s": AtLeast(0), "reason": str,
            "break_even": {
                "batch_size": (_COUNT, None), "flop_per_sample": (AtLeast(0), None), "known": Maybe(bool),
            },
            "notes": Maybe(list[str]), "measured_step_s": Maybe((_SECONDS, None)), "error": Maybe((float, None)),
            "rounds": Maybe([_SECONDS]),
        }
    ],
    "left": [
        {"strategy": str, "devices": AtLeast(0, int), "device_set": list[str], "step_kind": str, "why": str}
    ],
    "batch_size": _COUNT, "shards": _COUNT, "chosen": AtLeast(0, int), "seconds": _SECONDS,
    "serial_fraction": (AtLeast(0), None), "serial_error": (AtLeast(0), None), "amdahl_bound": (AtLeast(0), None),
    "history": _ERRORS,
    "check": (
        {"candidates": AtLeast(0, int), "mean_error": (AtLeast(0), None), "right_order": int, "pairs": int}, None,
    ),
    "too_close": {"part": AtLeast(0), **_ERRORS},
    "workloads": [{"device": Maybe(str), "made": Maybe(str), "new": Maybe(bool), "busy": Maybe(str)}],
    "measurements": [{"device": Maybe(str), "made": Maybe(str), "new": Maybe(bool), "busy": Maybe(str)}],
    "machine": {"cpu": Maybe(str), "gpus": Maybe(list[str])}, "identity": IDENTITY,
}  # fmt: skip


@dataclass(frozen=True)
class Planned(Record):
    """What every layout of a job would cost on every number of devices, ranked. Seconds and bytes.

    ``candidates``: one for each strategy, device set and step kind, the fastest a sample first and what does not fit
    last: ``strategy``, ``devices`` (how many), ``device_set``, ``layout``, ``step_kind``, ``batch_size`` (global),
    ``step_s``, ``terms`` (exposed seconds by name, their sum is ``step_s``), ``memory_bytes`` (of each device) and
    ``memory`` (its parts by name), ``room_bytes`` (what a device has, or ``None``), ``fits``, ``missing_bytes``,
    ``eligible`` (whether it may be chosen), ``doubtful`` (whether its prediction cannot be: see ``notices``),
    ``samples_per_s``, ``reason`` (a sentence), ``break_even`` (``batch_size`` and ``flop_per_sample`` from which it is
    faster than one device, or ``None`` each, and whether that is ``known``), ``notes``;
    after a check ``measured_step_s``, ``error`` (predicted / measured - 1) and ``rounds`` (the step of each run).
    ``chosen``: which candidate, by prediction; after a check the one that was measured fastest. ``left``: what could
    not be priced, with ``why``. ``scaling``: ``strong`` or ``weak``, where ``batch_size`` is that of one device.
    ``serial_fraction``: of a step on one device, what does not get shorter with fewer samples, ``serial_error`` by
    which part of its times the line that says so is off at most; ``amdahl_bound``: the speed-up that this allows at
    most, ``None``: any. ``history``:
    ``checks`` that were made here before, and ``mean_error`` of them. ``check``: of a check ``mean_error``,
    ``right_order`` and ``pairs`` (those more than a tenth apart). ``too_close``: the ``part`` by which candidates may
    differ and not be told apart, and the ``checks`` of these candidates and their ``mean_error`` that it comes from.
    ``workloads`` and ``measurements``: what it rests on, with dates, whether it is ``new``, found out for this plan,
    and ``busy``, what other programs kept busy then. ``identity``: of the model, as in ``Workload``.
    ``estimate_only``: the machine is not here. Raises ``UsageError`` for what is not of this form.
    """

    kind: ClassVar[str] = "plan"
    forms: ClassVar[Mapping[str, Any]] = _FORMS

    model: str
    precision: str
    level: str
    scaling: str
    batch_size: int
    candidates: list[dict[str, Any]]
    chosen: int
    left: list[dict[str, Any]]
    serial_fraction: float | None
    amdahl_bound: float | None
    history: dict[str, Any]
    workloads: list[dict[str, Any]]
    measurements: list[dict[str, Any]]
    machine: dict[str, Any]
    versions: dict[str, str]
    made: str
    seconds: float
    shards: int = 8
    serial_error: float | None = None
    estimate_only: bool = False
    check: dict[str, Any] | None = None
    too_close: dict[str, Any] = field(
        default_factory=lambda: {"part": CLOSE, "checks": 0, "mean_error": None}
    )
    notices: list[str] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checked()
        problem = _wrong(self)
        if problem:
            raise UsageError(f"a {self.kind} record that does not hold together", problem)

    @property
    def best(self) -> dict[str, Any]:
        """The candidate that was chosen."""
        return self.candidates[self.chosen]

    def __repr__(self) -> str:
        """Say what was chosen and why; all of it is in the fields."""
        return f"Planned({self.model}: {titled(self.best)}; {self.best['reason']})"


def _wrong(record: Planned) -> str:
    """Say what does not hold together in a record of its form, or ``""``."""
    if not record.candidates:
        return "it has no candidates"
    for place, row in enumerate(record.candidates):
        total = sum(row["terms"].values())
        if abs(total - row["step_s"]) > ROUNDING * row["step_s"] or row["step_s"] <= 0:
            return f"the terms of candidate {place} are {total} s together, its step {row['step_s']} s"
        if row["samples_per_s"] <= 0:
            return f"samples_per_s of candidate {place} is {row['samples_per_s']}"
        if len(row["device_set"]) != row["devices"]:
            return f"candidate {place} has {row['devices']} devices and names {len(row['device_set'])}"
    for name, known in (("history", record.history), ("too_close", record.too_close)):
        if known["checks"] and known["mean_error"] is None:
            return f"{name} has checks, and no mean_error of them"
    return (
        "" if record.chosen in range(len(record.candidates)) else f"there is no candidate {record.chosen!r}"
    )


def spelled_set(device_set: list[str]) -> str:
    """Write a device set as a user names it: ``cpu:2``, ``cuda:0,1``."""
    if set(device_set) == {"cpu"}:
        return f"cpu:{len(device_set)}"
    return f"cuda:{','.join(device.partition(':')[2] for device in device_set)}"


def device_type(device: str) -> str:
    """Return the type of a device: ``cpu`` or ``cuda``."""
    return device.partition(":")[0]


def type_of(row: dict[str, Any]) -> str:
    """Return the type of a candidate's devices."""
    return device_type(row["device_set"][0])


def one_device(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the one device that a candidate is compared with: in speed-ups, sentences, pictures and break-evens.

    ``rows``: all candidates, ranked. It is of the same type of device, and fits; of the same step kind where there is
    such a one, else the fastest. ``None``: nothing on one device can run.
    """
    alike = [
        other for other in rows if other["devices"] == 1 and other["fits"] and type_of(other) == type_of(row)
    ]
    same = [other for other in alike if other["step_kind"] == row["step_kind"]]
    return next(iter(same or alike), None)


def not_told_apart(rows: Sequence[dict[str, Any]], part: float) -> list[int]:
    """Return the places of the candidates that may be chosen: the fastest, and what is within ``part`` of it.

    ``rows``: all candidates, ranked. Where only more ranks than cores were asked for, the fastest of them is all there
    is.
    """
    may = [place for place, row in enumerate(rows) if row["fits"] and row.get("eligible", True)] or [0]
    fastest = rows[may[0]]["samples_per_s"]
    return [place for place in may if rows[place]["samples_per_s"] * (1 + part) >= fastest]


def titled(row: dict[str, Any]) -> str:
    """Write a candidate in words: ``one device (cpu:1)``, ``data=2 on cpu:2``, ``data=2 on cpu:2, compiled``."""
    where = short_set(row["device_set"])
    name = f"one device ({where})" if row["devices"] == 1 else f"{row['strategy']} on {where}"
    return name if row["step_kind"] == "eager" else f"{name}, {row['step_kind']}"


def short_set(device_set: list[str]) -> str:
    """Write a device set; many GPUs by their number."""
    gpus = len(device_set) if set(device_set) != {"cpu"} else 0
    return f"{gpus} GPUs" if gpus > 4 else spelled_set(device_set)
