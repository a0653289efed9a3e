"""From rows to shares of the measured peak, overheads and a verdict: no measuring here."""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "speed"))

from bars import settled_spread
from parts import columns
from result import cpu_checks, end_checks, machine_checks

Row = dict[str, Any]

MAX_SPREAD, OVERHEAD = 0.02, 1.01
# Least share of the peak by size and number of GPUs. By hand with DDP 0.49 and 0.44, 0.38 and 0.32 were read.
LEAST = {("124m", 1): 0.52, ("124m", 4): 0.50, ("774m", 1): 0.45, ("774m", 4): 0.42}
CPU_WORK = {"lenet-epoch": "LeNet, an epoch", "gpt-1m": "gpt 1M, 60 steps"}
JUDGED = "loose"


class Figures:
    """The step times that the rows of one run hold. Of what was measured several times, the most settled row counts."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._kway = [row for row in rows if row.get("kind") == "kway" and row["step_s"] is not None]
        self._hand = [row for row in rows if row.get("kind") == "hand"]
        self.others = [row for row in rows if row.get("kind") == "yardstick" and "mfu_of_measured" in row]
        self.peaks = [flops for row in rows if row.get("kind") == "peak" for flops in row["flops_of_blocks"]]

    @property
    def peak(self) -> float | None:
        """The median over all blocks of products of the run, operations a second."""
        return median(self.peaks) if self.peaks else None

    def kway(self, size: str, k: int, level: str = JUDGED, kind: str | None = None) -> Row | None:
        """Return kway's row in its fastest step kind, or in ``kind``."""
        return _fastest(self._kway, ("step_kind",), size=size, k=k, level=level, step_kind=kind)

    def hand(self, size: str, k: int, kind: str | None = None) -> Row | None:
        """Return the fastest row by hand, whatever was compiled together; of one step kind or of all."""
        return _fastest(self._hand, ("step_kind", "compiled"), size=size, k=k, step_kind=kind)

    def share(self, row: Row) -> float | None:
        """Return a row's share of the peak."""
        return None if self.peak is None else float(row["flop"] / row["step_s"] / self.peak)

    def every(self) -> list[Row]:
        """Return all rows that have a step time of their own."""
        return [*self._kway, *self._hand]


def _fastest(rows: Sequence[Row], ways: tuple[str, ...], **wanted: Any) -> Row | None:
    """Return the fastest of the ways; of several readings of one way the most settled, whatever its time."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if all(value is None or row[name] == value for name, value in wanted.items()):
            groups.setdefault(tuple(row[way] for way in ways), []).append(row)
    best = [min(group, key=_spread) for group in groups.values()]
    return min(best, key=lambda row: row["step_s"], default=None)


def _spread(row: Row) -> float:
    spread = row["spread"]
    return float("inf") if spread is None else float(spread)


def way(row: Row) -> str:
    """Name what a row was measured of."""
    how = [row[name] for name in ("level", "step_kind", "compiled") if name in row]
    return " ".join([row["kind"], row["size"], *how])


def is_settled(row: Row) -> bool:
    """Whether a reading's spread is within what counts."""
    return _spread(row) <= MAX_SPREAD


def share_checks(figures: Figures, sizes: Sequence[str], counts: Sequence[int]) -> list[Row]:
    """Judge kway's shares of the peak at level loose, and show those at math, and by hand."""
    checks = []
    sides: list[tuple[str, Callable[[str, int], Row | None]]] = [
        ("kway loose", figures.kway),
        ("kway math", lambda size, k: figures.kway(size, k, "math")),
        ("by hand", figures.hand),
    ]
    for size in sizes:
        for k in counts:
            for name, of in sides:
                least = LEAST.get((size, k))
                bar = "shown" if least is None else f"at least {least:.2f}"
                found = of(size, k)
                share = None if found is None else figures.share(found)
                check: Row = {
                    "check": f"gpt {size}, k={k}: share of the peak, {name}",
                    "bar": bar,
                    "judged": least is not None and name == "kway loose",
                    "ratio": share,
                    "passed": None,
                    "settled": None,
                }
                if found is not None and share is not None:
                    check.update(passed=share >= (least or 0.0), settled=is_settled(found), way=way(found))
                checks.append(check)
    return checks


def overhead_checks(figures: Figures, sizes: Sequence[str], counts: Sequence[int]) -> list[Row]:
    """Judge kway's fastest way by the fastest by hand; show like by like."""
    checks = []
    for size in sizes:
        for k in counts:
            for kind in (None, "compiled-graph", "compiled"):
                own, hand = figures.kway(size, k, kind=kind), figures.hand(size, k, kind)
                check: Row = {
                    "check": f"gpt {size}, k={k}: step, kway / by hand, {kind or 'the fastest of each'}",
                    "bar": f"at most {OVERHEAD:.2f}",
                    "judged": kind is None,
                    "ratio": None,
                    "passed": None,
                    "settled": None,
                }
                if own is not None and hand is not None:
                    ratio = own["step_s"] / hand["step_s"]
                    check.update(
                        ratio=ratio,
                        passed=ratio <= OVERHEAD,
                        settled=is_settled(own) and is_settled(hand),
                        way=f"{way(own)} / {way(hand)}",
                    )
                checks.append(check)
    return checks


def summarise(
    rows: list[Row], sizes: Sequence[str], counts: Sequence[int], of: Collection[str]
) -> tuple[Row, str, bool]:
    """Return the result as JSON data, tables for people, and whether nothing failed of what was measured.

    ``of``: which bars are judged, ``gpu`` and ``cpu``. ``counts``: numbers of GPUs. What fails: a judged bar that is
    missed or whose figures have not settled, a part that broke, rows of more than one machine or of more than an hour.
    """
    figures = Figures(rows)
    checks = end_checks(rows, ("kway", "hand", "peak", "cpu", "machine"))
    if "gpu" in of:
        checks += machine_checks(rows)
        checks += share_checks(figures, sizes, counts) + overhead_checks(figures, sizes, counts)
    if "cpu" in of:
        checks += cpu_checks(rows, CPU_WORK)
    peaks = settled_spread(figures.peaks)
    result = {
        "machines": [row for row in rows if row.get("part", "").startswith("machine") and "versions" in row],
        "peak_flops": figures.peak,
        "peak_spread": peaks,
        "share": "(6 n B T + 12 L D T B T) / median step time / median of the measured peak",
        "spread": "(max - min) / median, from ten values on over the medians of five consecutive blocks",
        "checks": checks,
        "steps": figures.every(),
        "others": figures.others,
        "cpu": [row for row in rows if row.get("kind") == "case"],
        "ends": [row for row in rows if row.get("kind") == "end"],
        "left_out": [row for row in rows if row.get("kind") in ("left out", "failed") or "err" in row],
    }
    wrong = [
        check
        for check in checks
        if check["judged"] and (check["passed"] is False or check["settled"] is False)
    ]
    return result, f"{_times(figures, peaks)}\n\n{_verdicts(checks)}", not wrong


def _times(figures: Figures, spread: float | None) -> str:
    peak = figures.peak
    lines = [["", "k", "ms a step", "spread", "share of the peak"]]
    if peak is not None:
        lines.append([f"peak {peak / 1e12:.1f} TFLOP/s", "-", "-", _percent(spread), "1.000"])
    for row in figures.every():
        share = figures.share(row)
        lines.append(
            [
                way(row),
                str(row["k"]),
                f"{row['step_s'] * 1e3:.3f}",
                _percent(row["spread"]),
                "-" if share is None else f"{share:.3f}",
            ]
        )
    for row in figures.others:
        # Of the peak that it measured itself.
        share = row["mfu_of_measured"]
        lines.append(
            [
                f"gpt.py {row['size']} {row['mode']}",
                str(row["k"]),
                f"{row['step_ms']:.3f}",
                "-",
                f"{share:.3f}",
            ]
        )
    return columns(lines)


def _verdicts(checks: list[Row]) -> str:
    words = {True: "pass", False: "MISS", None: "not measured"}
    lines = [["", "check", "value", "bar", "", "of"]]
    for check in checks:
        word, value = words[check["passed"]], check["ratio"]
        lines.append(
            [
                word if check["judged"] or value is None else f"({word})",
                check["check"],
                "-" if value is None else f"{value:.4g}",
                check["bar"],
                "NOT settled" if check["settled"] is False else "",
                check.get("way", ""),
            ]
        )
    return columns(lines)


def _percent(spread: float | None) -> str:
    return "-" if spread is None else f"{spread:.1%}"
