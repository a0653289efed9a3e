"""What was measured, as PNG pictures: one an experiment, a panel for each of its names that has several sizes."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kway.measurements import PERCENT, Measurements
from kway.report.curves import DOTS_PER_INCH, GREY
from kway.report.measured import MOST_PANELS, Curve, Panel, heading, panels, size_text
from kway.report.picture import write_png
from kway.units import rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours without the yellow, which is hard to see on white; marks tell curves apart in print as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":")
# Inches: read at 800 pixels, a point of the font is then more than a pixel.
WIDTH, HEIGHT, ABOVE, BELOW = 8.0, 3.2, 0.4, 0.3
# Parts of a panel's width at which its axes begin and end; right of them stands what the curves are.
LEFT, RIGHT = 0.105, 0.66
# Letters of a line that fit beside the axes.
LEGEND = 27
# Sizes so far apart that only their logarithms can be told apart.
FAR = 30
# Beyond what an axis shows it goes on for this part of that.
_ROOM = 0.06


def draw(record: Measurements, folder: Path) -> list[Path]:
    """Draw a picture ``EXPERIMENT.png`` into ``folder`` for each experiment with curves, and return the paths.

    Raises ``UsageError`` where a file cannot be written.
    """
    drawn = []
    for entry in record.experiments:
        own = [figure for figure in record.figures if figure["experiment"] == entry["name"]]
        curved = [panel for panel in panels(own) if panel.size][:MOST_PANELS]
        if curved:
            drawn.append(_picture(folder / f"{entry['name']}.png", title_of(entry), curved, _where(record)))
    return drawn


def title_of(entry: dict[str, Any]) -> str:
    """Say what a picture shows, in a line that fits: of what was remembered when it was measured, since that stays."""
    if entry["how"] != "remembered":
        return heading(entry)
    size = "quick" if entry["quick"] else "full"
    return f"{entry['name']} ({size}): measured on {entry['made'][:16].replace('T', ' ')} (UTC)"


def _where(record: Measurements) -> str:
    machine = record.machine
    gpus = ", ".join(machine["gpus"])
    parts = [machine["cpu"], f"{machine['usable']} processors", gpus, f"torch {record.versions['torch']}"]
    return " · ".join([*(part for part in parts if part), *([record.made[:10]] if record.made else [])])


def _picture(path: Path, title: str, curved: Sequence[Panel], footer: str) -> Path:
    from matplotlib.figure import Figure

    height = HEIGHT * len(curved) + ABOVE + BELOW
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH)
    figure.text(0.02, 1 - 0.15 / height, title, fontsize=12, fontweight="bold", va="top")
    for index, panel in enumerate(curved):
        bottom = height - ABOVE - HEIGHT * (index + 1)
        place = (LEFT, (bottom + 0.65) / height, RIGHT - LEFT, (HEIGHT - 1.05) / height)
        _draw_panel(figure.add_axes(place), panel)
    if any(len(distinct(panel.curves)) < len(panel.curves) for panel in curved):
        footer += " · other GPUs: see the record"
    figure.text(0.02, 0.1 / height, footer, fontsize=8.5, color=GREY)
    return write_png(figure, path)


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    curves = distinct(panel.curves)
    same = _shared(curves)
    for index, curve in enumerate(curves):
        sizes = sorted(curve.points)
        style: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKS[index % len(MARKS)],
            "linestyle": LINES[index // len(COLOURS) % len(LINES)],
        }
        values = [curve.points[size]["value"] for size in sizes]
        low, high = zip(*(band(curve.points[size]) for size in sizes), strict=True)
        axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(sizes, values, label=fill(label(curve, same), LEGEND), markersize=4.5, **style)
        limits = [curve.points[size]["limit"] for size in sizes if curve.points[size]["limit"]]
        if limits:
            axes.axhline(max(limits), color=style["color"], linewidth=0.9, linestyle=(0, (1, 2)))
    for index, mark in enumerate(panel.marks):
        _draw_mark(axes, mark, index)
    _scales(axes, panel)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(panel.size, size)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, panel.unit)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    # What the name says already needs no second word.
    said = panel.name.split()
    constant = ", ".join(f"{name} {value}" for name, value in same.items() if str(value) not in said)
    unit = "" if panel.unit == "s" else f", {panel.unit}"
    axes.set_title(panel.name + unit + (f" ({constant})" if constant else ""), fontsize=11, loc="left")
    axes.set_xlabel(panel.size)
    axes.tick_params(labelsize=8.5)
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if any(figure["limit"] for curve in curves for figure in curve.points.values()):
        axes.plot([], [], color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), label="limit of the hardware")
    if len(axes.get_legend_handles_labels()[1]) > 1 or not same:
        axes.legend(
            frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.01, 1.03), handlelength=2.6
        )


def _tick(value: float, unit: str) -> str:
    """Write a number at an axis: a rate without its unit, which stands above."""
    if not value:
        return "0"
    text = rate_text(value, unit)
    return text if unit == "s" else text.removesuffix(unit).rstrip()


def _scales(axes: "Axes", panel: Panel) -> None:
    """Set logarithmic axes where values are far apart, with ticks at sizes that were measured."""
    from matplotlib.ticker import FixedLocator

    sizes = panel.sizes
    figures = [figure for curve in panel.curves for figure in curve.points.values()]
    values = [figure["value"] for figure in figures]
    low, high = frame(figures)
    if sizes[0] > 0 and sizes[-1] / sizes[0] > FAR:
        axes.set_xscale("log")
    if min(values) > 0 and max(values) / min(values) > FAR:
        axes.set_yscale("log")
        beside = (high / low) ** _ROOM
        axes.set_ylim(low / beside, high * beside)
    elif min(values) >= 0:
        axes.set_ylim(0, (1 + _ROOM) * high or 1)
    else:
        beside = (high - low) * _ROOM
        axes.set_ylim(low - beside, high + beside)
    step = -(-len(sizes) // 7)
    axes.xaxis.set_major_locator(FixedLocator(sizes[::-1][::step]))


def band(figure: dict[str, Any], most: float = math.inf) -> tuple[float, float]:
    """Return the ends of what a figure is uncertain by, at most by ``most`` of it; a time or a rate stays above 0."""
    value = figure["value"]
    half = abs(value) * min(figure["spread"] or 0.0, most) / 2
    low = value - half
    return low if figure["unit"] == PERCENT else max(low, value / 100), value + half


def frame(figures: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the least and the most that an axis shows: all values, limits, and bands as far as they leave room.

    What is far more uncertain than it is large would press all curves into a line: its band leaves the frame.
    """
    ends = [end for figure in figures for end in band(figure, most=1.0)]
    return min(ends), max(ends + [figure["limit"] for figure in figures if figure["limit"]])


def _draw_mark(axes: "Axes", mark: dict[str, Any], index: int) -> None:
    rest = " ".join(str(value) for name, value in mark["parameters"].items() if name != "marks")
    text = f"{rest}: {mark['unit']} = {size_text(mark['unit'], mark['value'])}"
    axes.axvline(
        mark["value"],
        color=GREY,
        linewidth=1.2,
        linestyle=LINES[(index + 1) % len(LINES)],
        label=fill(text, LEGEND),
    )


def distinct(curves: Iterable[Curve]) -> list[Curve]:
    """Leave out curves that say of further GPUs what an earlier one says of the first: tables and record have them."""
    found: dict[tuple[str, ...], Curve] = {}
    for curve in curves:
        seen: dict[str, int] = {}
        key = tuple(
            f"{name}=gpu{seen.setdefault(str(value), len(seen))}"
            if str(value).startswith("cuda:")
            else f"{name}={value}"
            for name, value in curve.parameters.items()
        )
        found.setdefault(key, curve)
    return list(found.values())


def _shared(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return the parameters that all curves have alike."""
    first = curves[0].parameters
    return {
        name: value
        for name, value in first.items()
        if all(curve.parameters.get(name) == value for curve in curves)
    }


def label(curve: Curve, same: dict[str, Any]) -> str:
    """Say what a curve is, without what all of the panel are."""
    if {"from", "to"} <= curve.parameters.keys() - same.keys():
        rest = [
            _said(name, value)
            for name, value in curve.parameters.items()
            if name not in {"from", "to", *same}
        ]
        return " ".join([f"{curve.parameters['from']} to {curve.parameters['to']}", *rest])
    return (
        " ".join(_said(name, value) for name, value in curve.parameters.items() if name not in same)
        or "measured"
    )


def _said(name: str, value: Any) -> str:
    """Write a parameter; a bare number would not say of what."""
    return value if isinstance(value, str) else f"{name} {value}"
