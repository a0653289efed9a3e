"""The record of what a machine does in how long: figures by experiment, validated one by one."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kway.errors import UsageError
from kway.records import Record


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
        names = {entry["name"] for entry in self.experiments}
        for place, figure in enumerate(self.figures):
            problem = wrong_in_figure(figure, names)
            if problem:
                raise UsageError(f"figure {place} of {self.kind}.json", problem)

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


_FIGURE: dict[str, Any] = {
    "experiment": str, "name": str, "parameters": dict, "unit": str, "value": int | float,
    "spread": int | float | None, "raw": list, "limit": int | float | None, "share": int | float | None, "notes": list,
}  # fmt: skip


def wrong_in_figure(figure: Any, experiments: set[str]) -> str:
    """Say what is wrong with a figure, or ``""``."""
    if not isinstance(figure, dict):
        return f"it is a {type(figure).__name__}, not a table of fields"
    for name, kind in _FIGURE.items():
        value = figure.get(name, ...)
        if value is ... or isinstance(value, bool) or not isinstance(value, kind):
            return f"{name} is {'missing' if value is ... else repr(value)}"
    if figure["experiment"] not in experiments:
        return f"its experiment {figure['experiment']!r} is not among those of the record"
    if not all(isinstance(each, str | bool | int | float) for each in figure["parameters"].values()):
        return f"parameters {figure['parameters']!r} are not plain values"
    numbers = [figure["value"], *figure["raw"]]
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
        return f"{figure['name']} has values that are no finite numbers"
    if figure["spread"] is not None and not figure["spread"] >= 0:
        return f"spread is {figure['spread']!r}"
    if (figure["limit"] is None) != (figure["share"] is None):
        return "it has one of limit and share without the other"
    return ""
