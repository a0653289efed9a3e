"""Where the time of a step goes, as a PNG picture: a bar a layer, forward and backward."""

from pathlib import Path
from typing import Any

from kway.report.curves import DOTS_PER_INCH, GREY
from kway.report.picture import write_png
from kway.report.workload import MOST_LAYERS, Row, by_layer
from kway.units import seconds_text
from kway.workload import Workload

FILE = "workload.png"
# Okabe and Ito's blue and vermilion; hatched besides, for print.
FORWARD: dict[str, Any] = {"color": "#0072B2", "label": "forward"}
BACKWARD: dict[str, Any] = {"color": "#D55E00", "label": "backward", "hatch": "///", "edgecolor": "white"}
# Inches: read at 800 pixels, a point of the font is then more than a pixel.
WIDTH, BAR, ABOVE, BELOW = 8.0, 0.27, 0.75, 0.85
LEFT, RIGHT = 0.30, 0.84
LETTERS = 26


def draw(record: Workload, folder: Path) -> Path:
    """Draw ``workload.png`` into ``folder`` and return its path. Raises ``UsageError`` where it cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    rows = by_layer(record, MOST_LAYERS)
    height = ABOVE + BELOW + BAR * max(3, len(rows))
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH)
    place = (LEFT, BELOW / height, RIGHT - LEFT, 1 - (ABOVE + BELOW) / height)
    axes = figure.add_axes(place)
    title = f"{record.model}: time by layer in an eager step over {record.batch_size:,} samples"
    figure.text(0.02, 1 - 0.12 / height, title, fontsize=12, fontweight="bold", va="top")
    places = list(range(len(rows)))
    forward = [row.forward_s for row in rows]
    axes.barh(places, forward, height=0.72, **FORWARD)
    axes.barh(places, [row.backward_s for row in rows], left=forward, height=0.72, linewidth=0, **BACKWARD)
    longest = max((row.seconds for row in rows), default=0.0) or 1.0
    total = sum(row.seconds for row in rows) or 1.0
    for at, row in zip(places, rows, strict=True):
        axes.text(row.seconds + 0.015 * longest, at, _said(row, total), fontsize=8.5, va="center", color=GREY)
    axes.set_yticks(places, [_short(row.name) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.04 * longest)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else seconds_text(value)))
    axes.tick_params(labelsize=8.5)
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(LEFT - 0.01, 1 - 0.36 / height),
        ncols=2, frameon=False, fontsize=9, borderaxespad=0,
    )  # fmt: skip
    figure.text(0.02, 0.1 / height, _footer(record), fontsize=8.5, color=GREY)
    return write_png(figure, folder / FILE)


def _said(row: Row, total: float) -> str:
    bound = f", {row.bound}" if row.bound else ""
    return f"{row.seconds / total:.0%}{bound}"


def _short(name: str) -> str:
    return name if len(name) <= LETTERS else f"...{name[3 - LETTERS :]}"


def _footer(record: Workload) -> str:
    threads = record.machine.get("threads")
    parts = [
        record.device_name,
        f"{threads} threads" if record.device == "cpu" and threads else "",
        record.precision,
        f"torch {record.versions.get('torch', '')}",
        record.made[:10],
    ]
    return " · ".join(part for part in parts if part)
