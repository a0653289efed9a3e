"""What was measured, as tables: one for each name of an experiment, sizes from left to right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from kway.measurements import PERCENT, Measurements
from kway.report.tables import table
from kway.units import bytes_text, rate_text, seconds_text

# Columns that fit a terminal of a hundred characters; the record has all sizes.
MOST_SIZES = 5
# Tables, and panels of a picture, of an experiment: those that come first say the most.
MOST_PANELS = 12
Row = tuple[tuple[str, Any], ...]


@dataclass
class Curve:
    """Figures by ``size``, which share all other parameters."""

    parameters: dict[str, Any]
    points: dict[float, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Panel:
    """All figures of one name: ``size`` is the parameter that runs over them, ``""`` where none does."""

    experiment: str
    name: str
    unit: str
    size: str
    curves: list[Curve] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sizes(self) -> list[float]:
        """All sizes, ascending."""
        return sorted({size for curve in self.curves for size in curve.points})


def panels(figures: Iterable[dict[str, Any]]) -> list[Panel]:
    """Sort figures into panels, in the order in which they come; marks go to the panel that they name."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    marks: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for figure in figures:
        target = figure["parameters"].get("marks")
        place = (marks if target else found).setdefault((figure["experiment"], target or figure["name"]), [])
        place.append(figure)
    return [_panel(key, entries, marks.get(key, [])) for key, entries in found.items()]


def _panel(key: tuple[str, str], figures: Sequence[dict[str, Any]], marks: list[dict[str, Any]]) -> Panel:
    size = _running(figures)
    panel = Panel(*key, figures[0]["unit"], size, marks=marks)
    curves: dict[Row, Curve] = {}
    for figure in figures:
        rest = {name: value for name, value in figure["parameters"].items() if name != size}
        curve = curves.setdefault(tuple(rest.items()), Curve(rest))
        curve.points[figure["parameters"].get(size, 0)] = figure
    panel.curves = list(curves.values())
    return panel


def _running(figures: Sequence[dict[str, Any]]) -> str:
    """Return the parameter of all figures that is a number and takes the most values; ``""`` where none takes two."""
    values: dict[str, set[float]] = {}
    for figure in figures:
        for name, value in figure["parameters"].items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(name, set()).add(value)
    everywhere = [name for name in values if all(name in figure["parameters"] for figure in figures)]
    best = max(everywhere, key=lambda name: len(values[name]), default="")
    return best if best and len(values[best]) > 1 else ""


def size_text(name: str, size: float) -> str:
    """Write a size: bytes in binary units, other numbers as they are."""
    return bytes_text(round(size)) if name == "bytes" else f"{size:,.0f}" if size >= 10 else f"{size:.3g}"


def shown(sizes: Sequence[float], most: int = MOST_SIZES) -> list[float]:
    """Return at most so many of the sizes, evenly over the list, both ends with them."""
    if len(sizes) <= most:
        return list(sizes)
    return [sizes[round(place * (len(sizes) - 1) / (most - 1))] for place in range(most)]


def lines_of(record: Measurements) -> list[str]:
    """Return the tables of all experiments, with what came up, and how old the figures are."""
    lines: list[str] = []
    for entry in record.experiments:
        own = [figure for figure in record.figures if figure["experiment"] == entry["name"]]
        lines += [heading(entry), ""]
        found = panels(own)
        for panel in found[:MOST_PANELS]:
            lines += [*_table(panel), ""]
        rest = [panel.name for panel in found[MOST_PANELS:]]
        lines += [*wrapped(f"also in {record.kind}.json: {'; '.join(rest)}"), ""] if rest else []
        lines += [f"  {note}" for note in entry["notes"]]
        lines += [""] if entry["notes"] else []
    lines += [f"note       {text}" for text in record.notices]
    return lines


def wrapped(text: str) -> list[str]:
    """Return a text in lines as wide as tables are."""
    return wrap(text, 100, initial_indent="  ", subsequent_indent="  ")


def heading(entry: dict[str, Any]) -> str:
    """Say of an experiment when and how it was done."""
    if entry["how"] == "left":
        return f"{entry['name']}: not measured: {entry['why']}"
    if entry["how"] == "estimated":
        return f"{entry['name']}: estimated, not measured"
    size = "quick" if entry["quick"] else "full"
    if entry["how"] == "remembered":
        age = seconds_text(entry["age_s"])
        return f"{entry['name']} ({size}): as measured {age} ago ({entry['made']}); --refresh measures again"
    return f"{entry['name']} ({size}): measured in {seconds_text(entry['seconds'])}"


def _table(panel: Panel) -> list[str]:
    names = list(dict.fromkeys(name for curve in panel.curves for name in curve.parameters))
    sizes = shown(panel.sizes)
    columns = [size_text(panel.size, size) for size in sizes] if panel.size else ["value"]
    limited = any(figure["limit"] is not None for curve in panel.curves for figure in curve.points.values())
    headings = [*names, *columns, "spread", *(["limit", "of it"] if limited else [])]
    rows = []
    for curve in panel.curves:
        figures = [curve.points.get(size) for size in sizes]
        texts = [None if figure is None else rate_text(figure["value"], panel.unit) for figure in figures]
        row: list[object] = [*(curve.parameters.get(name) for name in names), *texts, _spread(figures)]
        if limited:
            row += _limit(curve, panel.unit)
        rows.append(row)
    title = f"{panel.name}, by {panel.size}" if panel.size else panel.name
    return [title, *table(headings, rows).splitlines(), *(_mark(mark) for mark in panel.marks)]


def _spread(figures: Iterable[dict[str, Any] | None]) -> str | None:
    """Write the largest spread; of shares, which may be about 0, in points: a part of 0 is no measure."""
    known = [figure for figure in figures if figure and figure["spread"] is not None]
    if not known:
        return None
    if known[0]["unit"] == PERCENT:
        return f"{max(figure['spread'] * abs(figure['value']) for figure in known):.3g} points"
    return f"{max(figure['spread'] for figure in known):.1%}"


def _limit(curve: Curve, unit: str) -> list[object]:
    """Return the limit, and the largest share of it that was reached."""
    figures = [figure for figure in curve.points.values() if figure["limit"] is not None]
    if not figures:
        return [None, None]
    best = max(figures, key=lambda figure: float(figure["share"]))
    return [rate_text(best["limit"], unit), f"{best['share']:.0%}"]


def _mark(mark: dict[str, Any]) -> str:
    rest = {name: value for name, value in mark["parameters"].items() if name != "marks"}
    where = " ".join(str(value) for value in rest.values())
    at = f"{mark['unit']} = {size_text(mark['unit'], mark['value'])}"
    # Two curves cross, where nothing else is said.
    return f"  {where}: {at}" if mark["notes"] else f"  {where}: less time from {at} on"
