"""What was measured on this machine before, one file an experiment, under what it depends on."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kway.devices.remembered import digest, read, write
from kway.forms import wrong
from kway.measurements import EXPERIMENT, FIGURE, wrong_in_figure
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
        if held is not None and _holds(held, experiment):
            return {"entry": held["entry"], "figures": held["figures"]}
    return None


def _holds(held: Mapping[str, Any], experiment: Experiment) -> bool:
    """Whether a file holds what was kept of an experiment: what is damaged counts as not remembered."""
    if wrong(held, {"entry": EXPERIMENT, "figures": [FIGURE]}) or held["entry"]["name"] != experiment.name:
        return False
    try:
        made = datetime.fromisoformat(held["entry"]["made"])
    except ValueError:
        return False
    is_moment = made.tzinfo is not None  # without one nobody can tell how long ago it was
    return is_moment and not any(wrong_in_figure(figure, {experiment.name}) for figure in held["figures"])


def keep(
    known: Mapping[str, Any],
    experiment: Experiment,
    quick: bool,
    entry: dict[str, Any],
    figures: list[dict[str, Any]],
) -> None:
    """Keep what was measured."""
    write(_place(known, experiment, quick), known, entry=entry, figures=figures)
