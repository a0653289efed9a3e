"""A plan as PNG pictures: speed-up against the number of devices, and what the time of each step is."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kway.planned import Planned, one_device, titled, type_of
from kway.report.curves import DOTS_PER_INCH, GREY
from kway.report.measured_plots import COLOURS, LINES, MARKS
from kway.report.picture import write_png
from kway.report.plans import term_names
from kway.units import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches; read at 800 pixels, a point of the font is then more than a pixel.
WIDTH = 8.0
# Of a hundred layouts the bars of the fastest tell enough.
MOST_BARS = 16
# Inches that a time beside a bar takes, with what keeps it apart from the bar and from a cross.
LABEL = 0.85
# Inches of a bar, and of what stands below the bars of a panel.
BAR, BELOW_BARS = 0.3, 0.62
CROSS: dict[str, Any] = {
    "color": "black", "marker": "x", "linestyle": "none", "markersize": 7, "markeredgewidth": 1.5
}  # fmt: skip
DEVICES = {"cpu": "CPU ranks", "cuda": "GPUs"}


def draw(record: Planned, folder: Path) -> list[Path]:
    """Draw speedup.png (where there are several numbers of devices) and terms.png into ``folder``; return the paths.

    Raises ``UsageError`` where a file cannot be written.
    """
    drawn = [_picture(folder / "terms.png", record, _draw_terms)]
    if len({row["devices"] for row in record.candidates}) > 1:
        drawn.append(_picture(folder / "speedup.png", record, _draw_speedups))
    return drawn


def _picture(path: Path, record: Planned, draw_on: Any) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.6), dpi=DOTS_PER_INCH)
    draw_on(figure, record)
    return write_png(figure, path)


def _title(figure: "Figure", record: Planned, text: str) -> None:
    height = figure.get_figheight()
    each = " on each device" if record.scaling == "weak" else ""
    where = (
        "estimate for a machine that is not here"
        if record.estimate_only
        else str(record.machine.get("cpu", ""))
    )
    gpus = ", ".join(dict.fromkeys(record.machine.get("gpus", [])))
    footer = " · ".join(
        part for part in (where, gpus, record.precision, record.level, record.made[:10]) if part
    )
    figure.text(0.02, 1 - 0.12 / height, f"{record.model}, batch {record.batch_size:,}{each}: {text}",
                fontsize=12, fontweight="bold", va="top")  # fmt: skip
    figure.text(0.02, 0.1 / height, footer, fontsize=8.5, color=GREY)


def curves(record: Planned) -> dict[str, list[tuple[int, float, float | None]]]:
    """Return points (devices, speed-up, measured speed-up) by what the curve is of; one device begins each."""
    found: dict[str, list[tuple[int, float, float | None]]] = {}
    kinds = {row["step_kind"] for row in record.candidates}
    types = {type_of(row) for row in record.candidates}
    for row in sorted(record.candidates, key=lambda row: int(row["devices"])):
        one = one_device(record.candidates, row)
        if row["devices"] == 1 or one is None:
            continue
        axes = ", ".join(row["layout"])
        # Layouts of several axes have many sizes on as many devices: the fastest of them is the curve.
        name = axes + (f" on {DEVICES[type_of(row)]}" if len(types) > 1 else "")
        name += f", {row['step_kind']}" if len(kinds) > 1 else ""
        points = found.setdefault(name, [(1, 1.0, _ratio(one, one, "measured_step_s"))])
        if points[-1][0] < row["devices"]:
            speed = row["samples_per_s"] / one["samples_per_s"]
            points.append((row["devices"], speed, _ratio(row, one, "measured_step_s")))
    return found


def _ratio(row: dict[str, Any], one: dict[str, Any], name: str) -> float | None:
    if not row.get(name) or not one.get(name):
        return None
    return float(row["batch_size"] / row[name] / (one["batch_size"] / one[name]))


def _draw_speedups(figure: "Figure", record: Planned) -> None:
    _title(figure, record, "speed-up over one device")
    axes = figure.add_axes((0.09, 0.17, 0.57, 0.71))
    found = curves(record)
    most = max((points[-1][0] for points in found.values()), default=2)
    counts = (
        list(range(1, most + 1))
        if most <= 16
        else sorted({n for points in found.values() for n, *_ in points})
    )
    axes.plot(
        counts, counts, color=GREY, linewidth=1.0, linestyle=(0, (4, 3)), label="ideal: k times as fast"
    )
    checked = False
    for index, (name, points) in enumerate(found.items()):
        style: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKS[index % len(MARKS)],
            "linestyle": LINES[index // len(COLOURS) % len(LINES)],
        }
        axes.plot(
            [n for n, *_ in points], [speed for _, speed, _ in points], label=name, markersize=5, **style
        )
        measured = [(n, speed) for n, _, speed in points if speed is not None]
        if len(measured) > 1:
            axes.plot(*zip(*measured, strict=True), **{**CROSS, "color": style["color"]}, zorder=5)
            checked = True
    if checked:
        axes.plot([], [], **CROSS, label="measured")
    if record.amdahl_bound is not None and record.amdahl_bound < 1.5 * most:
        axes.axhline(record.amdahl_bound, color=GREY, linewidth=1.0, linestyle=":",
                     label=f"Amdahl's bound, {record.amdahl_bound:.3g}")  # fmt: skip
    _finish(axes)
    if most > 16:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    else:
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel("times as fast as one device")
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    handles, labels = axes.get_legend_handles_labels()
    # Crosses belong to all curves, each in the colour of its own: they come last.
    order = sorted(range(len(labels)), key=lambda place: labels[place] == "measured")
    axes.legend([handles[place] for place in order], [labels[place] for place in order],
                frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1.02), handlelength=2.6)  # fmt: skip


def barred(record: Planned) -> list[dict[str, Any]]:
    """Return the candidates that have a bar: the fastest, and the one that was chosen."""
    rows = record.candidates[:MOST_BARS]
    # Where many are too close to tell apart it may be far behind the fastest.
    return rows if record.chosen < MOST_BARS else [*rows[:-1], record.best]


def _draw_terms(figure: "Figure", record: Planned) -> None:
    rows = barred(record)
    names = term_names(rows)
    # A scale for each type of device: beside a CPU's steps nothing would be seen of a GPU's.
    types = list(dict.fromkeys(map(type_of, rows)))
    panels = [[row for row in rows if type_of(row) == kind] for kind in types]
    below = 0.42 + 0.22 * -(-len(names) // 3)
    height = 0.5 + sum(BAR * len(panel) + BELOW_BARS for panel in panels) + below
    figure.set_figheight(height)
    count = len(record.candidates)
    some = f", {len(rows)} of {count} candidates" if len(rows) < count else ""
    _title(figure, record, f"what the time of a step is{some}")
    top = height - 0.5
    for panel in panels:
        top -= BAR * len(panel)
        axes = figure.add_axes((0.32, top / height, 0.62, BAR * len(panel) / height))
        _draw_bars(axes, record, panel, names)
        top -= BELOW_BARS
    _legend(figure, names, 0.3 / height)


def _draw_bars(axes: "Axes", record: Planned, rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    checked = any(row.get("measured_step_s") for row in rows)
    # Room on the right for a label, behind a cross for a longer one.
    room = 1.25e3 if checked else 1.15e3
    most = max(max(row["step_s"], row.get("measured_step_s") or 0.0) for row in rows) * room
    axes.set_xlim(0, most)
    width_in = axes.get_position().width * WIDTH
    for place, row in enumerate(rows):
        left = 0.0
        for index, name in enumerate(names):
            width = row["terms"].get(name, 0.0) * 1e3
            axes.barh(place, width, left=left, height=0.66, edgecolor="white", linewidth=0.6, **_fill(index))
            left += width
        measured = (row.get("measured_step_s") or 0.0) * 1e3
        if measured:
            axes.plot(measured, place, **CROSS)
        # What is predicted stands at the end of its bar, and behind a cross only where that leaves no room.
        text, gap_in = seconds_text(row["step_s"]), (measured - left) / most * width_in
        hidden = 0 < gap_in < LABEL
        axes.annotate(
            f"{text} predicted" if hidden else text, (measured if hidden else left, place), (7, 0),
            textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [_bar_name(record, row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _finish(axes)
    axes.set_xlabel("milliseconds a step" + (" (crosses: measured)" if checked else ""), fontsize=9.5)
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def _fill(index: int) -> dict[str, Any]:
    """Return how the bars of a term are filled: hatched, where the colours are used up."""
    return {"facecolor": COLOURS[index % len(COLOURS)], "hatch": "///" if index >= len(COLOURS) else ""}


def _bar_name(record: Planned, row: dict[str, Any]) -> str:
    chosen = row is record.best
    return f"{titled(row)}{' *' if chosen else ''}{'' if row['fits'] else ' (no room)'}"


def _legend(figure: "Figure", names: Sequence[str], bottom: float) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(edgecolor="white", label=name, **_fill(index)) for index, name in enumerate(names)]
    figure.legend(handles=patches, loc="lower left", bbox_to_anchor=(0.02, bottom), ncols=min(3, len(names)),
                  frameon=False, fontsize=9)  # fmt: skip


def _finish(axes: "Axes") -> None:
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
