"""The bars, and the ratios that are held against them: no measuring here, so any run can be judged again.

A figure is found by what it is of; a bar divides one by another of the same run on the same machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = dict[str, Any]

BLOCKS = 5
MAX_SPREAD = 0.05
WITHIN_S = 3600.0
EPOCH, STEP = "epoch_s", "step_s"


@dataclass(frozen=True)
class Figure:
    """A time in seconds with its spread (``None``: measured once) and what it is of."""

    seconds: float
    spread: float | None
    of: str


@dataclass(frozen=True)
class Bar:
    """One promise: ``name``, the largest ratio, and how to find the time and what it is divided by.

    ``judged``: whether a miss fails the run. ``strict``: the ratio must be below the bar.
    """

    name: str
    most: float
    time: Callable[["Figures"], Figure | None]
    by: Callable[["Figures"], Figure | None]
    judged: bool = True
    strict: bool = False


def settled_spread(values: Sequence[float]) -> float | None:
    """Return (max - min) / median: over the medians of five consecutive blocks from ten values on, else over all.

    ``None`` for fewer than two values: that says nothing of how settled they are.
    """
    if len(values) < 2:
        return None
    if len(values) >= 2 * BLOCKS:
        edges = [index * len(values) // BLOCKS for index in range(BLOCKS + 1)]
        values = [median(values[edges[at] : edges[at + 1]]) for at in range(BLOCKS)]
    return (max(values) - min(values)) / median(values)


class Figures:
    """The times that the rows of one run hold. Of what was measured several times, the most settled row counts."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.kway = [row for row in rows if row.get("kind") == "train"]
        self.others = [row for row in rows if row.get("kind") == "yardstick"]

    def own(
        self,
        model: str,
        k: int,
        precision: str,
        what: str,
        level: str = "loose",
    ) -> Figure | None:
        """Return kway's time of ``what`` in its fastest step kind: over kinds and memory formats, not over tries."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.kway:
            if (row["model"], row["k"], row["precision"], row["level"]) == (
                model,
                k,
                precision,
                level,
            ) and row[what] is not None:
                groups.setdefault((row["step_kind"], row["memory_format"]), []).append(row)
        best = [_most_settled(rows, what) for rows in groups.values()]
        found = min(best, key=lambda row: row[what], default=None)
        if found is None:
            return None
        name = f"kway {model} {precision} {level} {found['step_kind']} {found['memory_format']} k={k}"
        return Figure(found[what], found[f"{what}_spread"], name)

    def peer(self, what: str, k: int) -> Figure | None:
        """Return the median epoch after the first of another candidate, by the name that its row gives it."""
        rows = [
            {**row, EPOCH: median(after), f"{EPOCH}_spread": settled_spread(after)}
            for row in self.others
            if row.get("what") == what and row["k"] == k and (after := row["all"][1:])
        ]
        if not rows:
            return None
        row = _most_settled(rows, EPOCH)
        return Figure(row[EPOCH], row[f"{EPOCH}_spread"], f"{what} k={k}")

    def graph_step(self, model: str, k: int) -> Figure | None:
        """Return the hand-made compiled graph's step: with its all-reduce, or on one GPU without; slowest rank."""
        mode = "c" if k == 1 else "cr"
        rows = [
            row
            for row in self.others
            if row.get("file") == "graph" and (row["m"], row["k"], row["mode"]) == (model, k, mode)
        ]
        times = [max(row["us"]) * 1e-6 for row in rows if min(row["us"]) > 0]
        if not times:
            return None
        return Figure(median(times), settled_spread(times), f"graph.py {model} {mode} k={k}")

    def floor_step(self, model: str, batch: int, precision: str | None = None) -> Figure | None:
        """Return the fastest step of floor.py at this batch, over every way it has, or those of one precision."""
        tries: dict[str, list[float]] = {}
        for row in self.others:
            if (row.get("file"), row.get("m"), row.get("batch")) != ("floor", model, batch):
                continue
            if isinstance(row["us"], int | float) and precision in (None, row["prec"]):
                flags = [flag for flag in ("compile", "bench", "graph") if row[flag]]
                way = " ".join([row["prec"], row["fmt"], *flags])
                tries.setdefault(way, []).append(row["us"] * 1e-6)
        if not tries:
            return None
        way = min(tries, key=lambda name: median(tries[name]))
        return Figure(median(tries[way]), settled_spread(tries[way]), f"floor.py {model} {way}")


def _most_settled(rows: Sequence[Row], what: str) -> Row:
    """Choose by the spread alone, never by the time: a lucky fast row is no better than others."""

    def unsettled(row: Row) -> float:
        spread = row[f"{what}_spread"]
        return float("inf") if spread is None else float(spread)

    return min(rows, key=unsettled)


def _own(
    model: str, k: int, precision: str, what: str = EPOCH, level: str = "loose"
) -> Callable[[Figures], Figure | None]:
    return lambda figures: figures.own(model, k, precision, what, level)


def _peer(what: str, k: int) -> Callable[[Figures], Figure | None]:
    return lambda figures: figures.peer(what, k)


def gpu_bars() -> list[Bar]:
    """List what is promised on GPUs."""
    ddp, scratch = "DDP fp32 resident {}", "seed LeNet from scratch"
    bars = []
    # kway's fp32 has TF32 off and the others have it on; like for like is shown beside.
    for precision in ("fp32", "tf32"):
        judged = precision == "fp32"
        note = "" if judged else " (TF32 as the others, shown)"
        for k, most in ((1, 0.20), (4, 0.12)):
            name = f"LeNet epoch, k={k}: kway / DDP with data on the GPU{note}"
            bars.append(Bar(name, most, _own("lenet", k, precision), _peer(ddp.format("lenet"), k), judged))
        name = f"LeNet epoch, k=4: kway / from-scratch loop{note}"
        bars.append(Bar(name, 0.04, _own("lenet", 4, precision), _peer(scratch, 4), judged))
        for few, many in ((1, 2), (2, 4)):
            name = f"LeNet epoch: kway on {many} / on {few}{note}"
            own = [_own("lenet", count, precision) for count in (many, few)]
            bars.append(Bar(name, 1.0, *own, judged=judged, strict=True))
        for k in (1, 2, 4):
            name = f"LeNet step, k={k}: kway / graph.py's compiled graph{note}"
            bars.append(
                Bar(
                    name,
                    1.10,
                    _own("lenet", k, precision, STEP),
                    lambda f, k=k: f.graph_step("lenet", k),
                    judged,
                )
            )
    for k, package, most in (
        (1, "Accelerate", 0.42),
        (1, "Fabric", 0.40),
        (4, "Accelerate", 0.27),
        (4, "Fabric", 0.27),
    ):
        name = f"ResNet-18 epoch, bf16, k={k}: kway / {package} bf16"
        bars.append(
            Bar(name, most, _own("resnet18", k, "bf16"), _peer(f"{package} bf16 DataLoader resnet18", k))
        )
    four, one = (_own("resnet18", k, "bf16", STEP) for k in (4, 1))
    bars.append(Bar("ResNet-18 step, bf16: kway on 4 / on 1", 1.10, four, one))
    floor = "ResNet-18 step, bf16, k=1: kway / best of floor.py"
    bars.append(Bar(floor, 1.05, one, lambda f: f.floor_step("resnet18", 256)))
    bars.append(
        Bar(
            f"{floor} in bf16 autocast (shown)",
            1.05,
            one,
            lambda f: f.floor_step("resnet18", 256, "bf16"),
            False,
        )
    )
    for k in (1, 2, 4):
        for level in ("math", "bits"):
            judged = level == "math"
            name = f"ResNet-18 step, bf16, k={k}: kway {level} / loose{'' if judged else ' (shown)'}"
            own = [_own("resnet18", k, "bf16", STEP, which) for which in (level, "loose")]
            bars.append(Bar(name, 1.25, *own, judged=judged))
    for k in (1, 2, 4):
        name = f"ResNet-18 epoch, TF32, k={k}: kway / DDP with data on the GPU"
        bars.append(Bar(name, 0.60, _own("resnet18", k, "tf32"), _peer(ddp.format("resnet18"), k)))
    return bars


def held_against(bar: Bar, figures: Figures) -> Row:
    """Form the ratio of a bar: ``passed`` is ``None`` where one of the two was not measured."""
    time, by = bar.time(figures), bar.by(figures)
    check: Row = {
        "check": bar.name,
        "bar": f"{'below' if bar.strict else 'at most'} {bar.most:.2f}",
        "judged": bar.judged,
    }
    if time is None or by is None:
        missing = [side for side, figure in (("kway", time), ("the other", by)) if figure is None]
        return {**check, "ratio": None, "passed": None, "settled": None, "missing": " and ".join(missing)}
    ratio = time.seconds / by.seconds
    spreads = [figure.spread for figure in (time, by)]
    return {
        **check,
        "ratio": ratio,
        "passed": ratio < bar.most if bar.strict else ratio <= bar.most,
        # A single reading has no spread, and so has not settled.
        "settled": all(spread is not None and spread <= MAX_SPREAD for spread in spreads),
        "time": vars(time),
        "by": vars(by),
    }
