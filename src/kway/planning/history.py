"""How far predictions were off on this machine: every check is kept, and later plans say so."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from kway.devices.remembered import digest, read, write
from kway.forms import Maybe, wrong
from kway.planned import CLOSE, CLOSE_AT_MOST
from kway.planning.candidates import Candidate
from kway.records import Cluster

# As many as the figure that later plans show is of; older ones say how kway was.
MOST = 500
# What is read of a check.
_CHECK = {
    "error": float, "model": Maybe(str), "strategy": Maybe(str), "device_set": Maybe(list[str]),
    "step_kind": Maybe(str),
}  # fmt: skip


def facts_of(cluster: Cluster) -> dict[str, Any]:
    """Return what tells this machine from others: processors and GPUs."""
    return {
        "cpu": [cluster.cpu["model"], cluster.cpu["cores"], cluster.cpu["usable"]],
        "gpus": [[gpu["name"], gpu["memory_total"]] for gpu in cluster.gpus],
    }


def _place(facts: Mapping[str, Any]) -> Path:
    return Path("planned") / f"{digest(facts)}.json"


def recall(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the checks that were made on this machine, oldest first: one each with at least ``error``."""
    held = read(_place(facts), facts)
    found = held.get("checks") if held is not None else None
    return [each for each in found if not wrong(each, _CHECK)] if isinstance(found, list) else []


def keep(facts: Mapping[str, Any], checks: Iterable[Mapping[str, Any]]) -> None:
    """Add checks to those of this machine."""
    every = [*recall(facts), *map(dict, checks)]
    write(_place(facts), facts, checks=every[-MOST:])


def summary(checks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many checks there are, and by which part of what was measured predictions were off on average."""
    errors = [abs(entry["error"]) for entry in checks]
    return {"checks": len(errors), "mean_error": fmean(errors) if errors else None}


def of_candidates(
    checks: Iterable[Mapping[str, Any]], candidates: Iterable[Candidate], model: str
) -> list[Mapping[str, Any]]:
    """Return the checks of these candidates: same strategy, devices and step kind; of ``model`` where there are such,
    else of any.
    """
    keys = {(each.strategy, each.device_set, each.step_kind) for each in candidates}
    of_these = [
        each
        for each in checks
        if (each.get("strategy"), tuple(each.get("device_set") or ()), each.get("step_kind")) in keys
    ]
    return [each for each in of_these if each.get("model") == model] or of_these


def too_close(
    checks: Iterable[Mapping[str, Any]], candidates: Iterable[Candidate], model: str
) -> dict[str, Any]:
    """Return ``Planned.too_close``: by which part candidates may differ and not be told apart.

    That is ``CLOSE``, or the mean error of the checks of these candidates where that is more: who was off by a tenth
    does not know which of two is faster that are closer. ``CLOSE_AT_MOST`` in any case.
    """
    known = summary(of_candidates(checks, candidates, model))
    return {"part": min(CLOSE_AT_MOST, max(CLOSE, known["mean_error"] or 0.0)), **known}


def entry(row: Mapping[str, Any], model: str, made: str) -> dict[str, Any]:
    """Return what is kept of a candidate that was measured."""
    names = ("strategy", "device_set", "step_kind", "batch_size", "step_s", "measured_step_s", "error")
    return {"made": made, "model": model, **{name: row[name] for name in names}}
