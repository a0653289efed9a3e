"""What was measured on this machine before, one file an experiment, under what it depends on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kway.devices.remembered import digest, read, write
from kway.measurements import wrong_in_figure
from kway.measuring.experiment import Experiment
from kway.records import Cluster

FACTS_OF_A_GPU = ("index", "name", "memory_total", "compute_capability")


def facts(cluster: Cluster, devices: tuple[str, ...], cpu_ranks: int, threads: int) -> dict[str, Any]:
    """Return what figures depend on: hardware, driver, torch, and which part of the machine is used."""
    torch = cluster.torch
    return {
        "cpu": [cluster.cpu["model"], cluster.cpu["cores"], cluster.cpu["usable"], threads],
        "gpus": [[gpu[name] for name in FACTS_OF_A_GPU] for gpu in cluster.gpus],
        "links": cluster.links,
        "driver": cluster.driver,
        "torch": [torch["version"], torch["cuda"]],
        "devices": list(devices),
        "cpu_ranks": cpu_ranks,
    }


def _place(known: Mapping[str, Any], experiment: Experiment, quick: bool) -> Path:
    size = "quick" if quick else "full"
    return Path("measured") / digest([known, experiment.version]) / f"{experiment.name}-{size}.json"


def recall(known: Mapping[str, Any], experiment: Experiment, quick: bool) -> dict[str, Any] | None:
    """Return ``entry`` and ``figures`` of an experiment that was done under the same facts; ``None``: there are none.

    Where quick ones are asked for, those of a full measurement count, and come first.
    """
    for size in (False, True) if quick else (False,):
        held = read(_place(known, experiment, size), known)
        try:
            entry, figures = (dict(held["entry"]), list(held["figures"])) if held is not None else ({}, [])
            broken = any(wrong_in_figure(figure, {experiment.name}) for figure in figures)
            if entry and not broken and entry["made"]:
                return {"entry": entry, "figures": figures}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def keep(
    known: Mapping[str, Any],
    experiment: Experiment,
    quick: bool,
    entry: dict[str, Any],
    figures: list[dict[str, Any]],
) -> None:
    """Keep what was measured."""
    write(_place(known, experiment, quick), known, entry=entry, figures=figures)
