"""Whether predictions put candidates in the right order."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

# Candidates that are closer than this part are not told apart by a measurement either.
APART = 0.1


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the rows that were measured: how many ``candidates``, their ``mean_error``, and of the ``pairs`` that are
    a tenth apart how many are in ``right_order``. By the time of a sample, so that steps of several batches compare.
    """
    measured = [row for row in rows if row.get("measured_step_s")]
    times = [(sample_s(row, "step_s"), sample_s(row, "measured_step_s")) for row in measured]
    pairs = [(a, b) for a, b in combinations(times, 2) if max(a[1], b[1]) > (1 + APART) * min(a[1], b[1])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    return {
        "candidates": len(measured),
        "mean_error": fmean(abs(row["error"]) for row in measured) if measured else None,
        "right_order": right,
        "pairs": len(pairs),
    }


def sample_s(row: dict[str, Any], name: str) -> float:
    """Return the seconds of a sample. ``name``: of which step, ``step_s`` or ``measured_step_s``."""
    return float(row[name] / row["batch_size"])
