"""Learning curves of one training run as a PNG: loss and every metric by epoch."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kway.errors import UsageError
from kway.records import Training
from kway.report.lines import metrics, number
from kway.report.picture import write_png
from kway.units import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From the Okabe-Ito palette, told apart with any colour vision; marks and lines differ as well, for print.
TRAIN: dict[str, Any] = {"color": "#0072B2", "marker": "o", "linestyle": "-"}
HELD_OUT: dict[str, Any] = {"color": "#D55E00", "marker": "s", "linestyle": "--"}
GREY = "#555555"
DOTS_PER_INCH = 150
PANELS_IN_A_ROW = 3
# Inches around the axes of a panel, with room for numbers of nine characters on the left, and above all panels.
LEFT, RIGHT, BELOW, ABOVE, TITLE = 1.05, 0.25, 0.55, 0.35, 0.5
# Metrics that are a share of the samples by definition, so that the axis can say so.
SHARES = frozenset({"accuracy", "precision", "recall", "f1"})

Series = list[float]


def draw(training: Training | dict[str, Any], path: Path) -> Path:
    """Draw the curves of ``training`` into the PNG file ``path`` and return it.

    ``training`` is the record or its JSON form. One panel shows training and, where there is any, validation
    loss; each metric has a panel of its own. Values that are absent or not finite leave a gap.
    Raises ``UsageError`` where the run has no complete epoch or the file cannot be written.
    """
    from matplotlib.figure import Figure

    record = training if isinstance(training, Training) else Training.from_dict(training)
    if not record.epochs:
        raise UsageError("a training record without a complete epoch", "curves need at least one")
    epochs = [int(entry["epoch"]) for entry in record.epochs]
    panels = _panels(record.epochs)
    columns = min(len(panels), PANELS_IN_A_ROW)
    rows = math.ceil(len(panels) / columns)
    width, height = max(7.0, 4.6 * columns), 3.4 * rows + 0.9
    # Its panels have fixed places: to measure all texts for a layout, and to draw everything twice for that, takes
    # three times as long as the rest.
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH)
    title = f"{record.model}, {layout_text(record)}"
    left = 0.14 / width
    figure.text(left, 1 - 0.14 / height, title, fontsize=13, fontweight="bold", va="top")
    for index, (name, train, held_out) in enumerate(panels):
        row, column = divmod(index, columns)
        x, y = column * width / columns, height - TITLE - 3.4 * (row + 1)
        place = (x + LEFT) / width, (y + BELOW) / height
        size = (width / columns - LEFT - RIGHT) / width, (3.4 - BELOW - ABOVE) / height
        _panel(figure.add_axes((*place, *size)), name, epochs, train, held_out)
    figure.text(left, 0.12 / height, _footer(record), fontsize=8.5, color=GREY)
    return write_png(figure, path)


def layout_text(record: Training) -> str:
    """Say what the run used: ``data on 2 CPU ranks``, ``single on cuda:1``."""
    if set(record.device_set) == {"cpu"}:
        return f"{record.strategy} on {f'{record.devices} CPU ranks' if record.devices > 1 else 'the CPU'}"
    if len(record.device_set) > 4:
        return f"{record.strategy} on {record.devices} devices"
    return f"{record.strategy} on {', '.join(record.device_set)}"


def _panels(entries: Sequence[dict[str, Any]]) -> list[tuple[str, Series, Series]]:
    """List (name, training values, validation values), the loss first."""
    held_out_names = {name for entry in entries for name in metrics(entry)}
    train_names = {key[6:] for entry in entries for key in entry if key.startswith("train_")}
    found = [("loss", _series(entries, "train_loss"), _series(entries, "validation_loss"))]
    for name in sorted((held_out_names | train_names) - {"loss"}):
        found.append((name, _series(entries, f"train_{name}"), _series(entries, name)))
    return found


def _series(entries: Sequence[dict[str, Any]], key: str) -> Series:
    values = (number(entry.get(key)) for entry in entries)
    return [value if value is not None and math.isfinite(value) else math.nan for value in values]


def _panel(axes: "Axes", name: str, epochs: Sequence[int], train: Series, held_out: Series) -> None:
    from matplotlib.ticker import MaxNLocator

    # Single epochs need their marks; among many, marks only hide the line.
    size = 4.5 if len(epochs) <= 40 else 0.0
    drawn = False
    for label, values, style in [("training", train, TRAIN), ("validation", held_out, HELD_OUT)]:
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            continue
        drawn = True
        axes.plot(epochs, values, label=f"{label}, last {finite[-1]:.4g}", markersize=size, **style)
    axes.set_title(name, fontsize=11, loc="left", y=1.0)
    axes.yaxis.set_offset_position("right")  # a common factor of all numbers would stand in the title
    axes.set_xlabel("epoch")
    axes.set_ylabel(_axis_label(name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    # One epoch would otherwise get an axis of fractions of an epoch.
    axes.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if drawn:
        axes.legend(frameon=False, fontsize=9, handlelength=3.2)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center", color=GREY)


def _axis_label(name: str) -> str:
    if name == "loss":
        return "loss (mean over the epoch)"
    return f"{name} (share, 0 to 1)" if name in SHARES else name


def _footer(record: Training) -> str:
    trained = sum(number(entry.get("seconds")) or 0.0 for entry in record.epochs)
    rates = sorted(number(entry.get("samples_per_s")) or 0.0 for entry in record.epochs)
    parts = [
        f"batch {record.batch_size}",
        record.precision,
        f"exactness {record.exactness}",
        f"{record.steps:,} steps in {seconds_text(trained)} of training",
        f"median epoch {rates[len(rates) // 2]:,.0f} samples/s",
    ]
    return " · ".join(parts)
