"""The record of what a machine does in how long: figures by experiment, validated one by one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kway.errors import UsageError
from kway.forms import AtLeast, Maybe, OneOf, wrong
from kway.records import Record

# The unit of a share of something, times 100: it may be 0 or less.
PERCENT = "%"
HOW = ("measured", "remembered", "left", "estimated")
# What records have of an experiment and of a figure.
EXPERIMENT: dict[str, Any] = {
    "name": str, "how": OneOf(HOW), "why": str, "quick": bool, "made": str, "age_s": AtLeast(0), "seconds": AtLeast(0),
    "tries": AtLeast(0, int), "drift": AtLeast(0), "noisy": str, "left": dict[str, str], "notes": list[str],
    "busy": Maybe(str),
}  # fmt: skip
FIGURE: dict[str, Any] = {
    "experiment": str, "name": str, "parameters": dict[str, str | bool | int | float], "unit": str, "value": float,
    "spread": (AtLeast(0), None), "raw": list[float], "limit": float | None, "share": float | None, "notes": list[str],
}  # fmt: skip
# Which parameters prices and estimates read, by experiment and what the names of its figures begin with.
_COUNT = AtLeast(1, int)
_READ: dict[tuple[str, str], dict[str, Any]] = {
    ("collectives", "time, "): {"collective": str, "backend": str, "ranks": _COUNT, "bytes": AtLeast(1)},
    ("beside", "collective after work"): {
        "collective": str,
        "backend": str,
        "ranks": _COUNT,
        "bytes": AtLeast(1),
    },
    ("beside", "ranks beside each other: slowdown"): {"ranks": _COUNT},
    ("beside", "threads beside each other: slowdown"): {"threads": _COUNT},
    ("beside", "turns of threads"): {"threads": _COUNT},
    ("beside", "sum of threads"): {"threads": _COUNT, "bytes": AtLeast(1)},
    ("overlap", "slowdown beside an all-reduce"): {"bytes": AtLeast(1)},
    ("overlap", "two devices, "): {"n": _COUNT, "way": str},
    ("compute", "elementwise add"): {"elements": _COUNT, "dtype": str},
}


@dataclass(frozen=True)
class Measurements(Record):
    """What a machine does in how long, each figure beside the limit of the hardware where that is known.

    ``figures``: one each with ``experiment``, ``name``, ``parameters`` (plain values by name), ``unit``, ``value``,
    ``spread`` (by which part of itself it is uncertain, or ``None``), ``raw`` (the samples, in the same unit; empty for
    what was computed from other figures), ``limit`` and ``share`` (of the limit) or ``None``, and ``notes``.
    ``experiments``: one each with ``name``, ``how`` (``measured``, ``remembered``, ``left``, ``estimated``), ``why``
    (where left), ``quick``, ``made`` (date), ``age_s``, ``seconds`` (that it took), ``tries`` and ``drift`` (of its
    reference, at most), ``noisy`` (what was too noisy, or ``""``), ``left`` (candidates that were left out, with the
    reason), ``notes`` and ``busy`` (what other programs kept busy meanwhile, like ``1.8 of 2 processors``, or ``""``).
    ``age_s``: of the oldest figures. ``machine``: as in ``Training``, with ``driver``. Raises
    ``UsageError`` for figures that are not of this form.
    """

    kind: ClassVar[str] = "measurements"
    forms: ClassVar[Mapping[str, Any]] = {
        "machine": {
            "host": Maybe(str), "cpu": Maybe(str), "usable": Maybe(int), "gpus": Maybe(list[str]),
            "threads": Maybe((AtLeast(1, int), None)),
        },
        "age_s": AtLeast(0),
        "experiments": [EXPERIMENT],
        "figures": [FIGURE],
    }  # fmt: skip

    machine: dict[str, Any]
    versions: dict[str, str]
    devices: list[str]
    quick: bool
    made: str
    age_s: float
    seconds: float
    experiments: list[dict[str, Any]]
    figures: list[dict[str, Any]]
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checked()
        names = {entry["name"] for entry in self.experiments}
        for place, figure in enumerate(self.figures):
            problem = wrong_in_figure(figure, names)
            if problem:
                raise UsageError(
                    f"a {self.kind} record that does not hold together", f"figures[{place}]: {problem}"
                )

    @property
    def is_estimate(self) -> bool:
        """Whether the figures are of a machine that is not here."""
        return any(entry["how"] == "estimated" for entry in self.experiments)

    def find(self, experiment: str, name: str, **parameters: Any) -> list[dict[str, Any]]:
        """Return the figures of that name whose parameters have at least these values."""
        return [
            figure
            for figure in self.figures
            if (figure["experiment"], figure["name"]) == (experiment, name)
            and parameters.items() <= figure["parameters"].items()
        ]


def beside_others(entries: Iterable[Mapping[str, Any]]) -> list[tuple[list[str], str, str]]:
    """Return the experiments that were done while other programs kept processors busy: names, what was busy and when
    the first of them was done, for each that was so at once. ``entries``: rows of ``experiments``.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if entry.get("busy"):
            found.setdefault(entry["busy"], []).append(entry)
    return [
        ([entry["name"] for entry in held], others, min(entry["made"] for entry in held))
        for others, held in found.items()
    ]


def wrong_in_figure(figure: Mapping[str, Any], experiments: set[str]) -> str:
    """Say what is wrong with a figure that is of its form, or ``""``: what prices read of it must be there."""
    if figure["experiment"] not in experiments:
        return f"its experiment {figure['experiment']!r} is not among those of the record"
    if (figure["limit"] is None) != (figure["share"] is None):
        return "it has one of limit and share without the other"
    for (experiment, name), read in _READ.items():
        if figure["experiment"] == experiment and figure["name"].startswith(name):
            return wrong(figure["parameters"], read, "parameters")
    return ""
