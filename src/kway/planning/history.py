"""How far predictions were off on this machine: every check is kept, and later plans say so."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from kway.devices.remembered import digest, read, write
from kway.records import Cluster

# As many as the figure that later plans show is of; older ones say how kway was.
MOST = 500


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
    if not isinstance(found, list):
        return []
    return [
        entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("error"), int | float)
    ]


def keep(facts: Mapping[str, Any], checks: Iterable[Mapping[str, Any]]) -> None:
    """Add checks to those of this machine."""
    every = [*recall(facts), *map(dict, checks)]
    write(_place(facts), facts, checks=every[-MOST:])


def summary(checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many checks there are, and by which part of what was measured predictions were off on average."""
    errors = [abs(entry["error"]) for entry in checks]
    return {"checks": len(errors), "mean_error": fmean(errors) if errors else None}


def entry(row: Mapping[str, Any], model: str, made: str) -> dict[str, Any]:
    """Return what is kept of a candidate that was measured."""
    names = ("strategy", "device_set", "step_kind", "batch_size", "step_s", "measured_step_s", "error")
    return {"made": made, "model": model, **{name: row[name] for name in names}}
