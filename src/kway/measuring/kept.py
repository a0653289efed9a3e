"""What was measured on this machine before, one file an experiment, under what it depends on."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kway.devices.torch_facts import cache_folder
from kway.measurements import wrong_in_figure
from kway.measuring.experiment import Experiment
from kway.records import Cluster, write_atomically

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


def _file(known: Mapping[str, Any], experiment: Experiment, quick: bool) -> Path:
    text = json.dumps([known, experiment.version], sort_keys=True)
    folder = hashlib.sha256(text.encode()).hexdigest()[:24]
    size = "quick" if quick else "full"
    return cache_folder() / "measured" / folder / f"{experiment.name}-{size}.json"


def recall(known: Mapping[str, Any], experiment: Experiment, quick: bool) -> dict[str, Any] | None:
    """Return ``entry`` and ``figures`` of an experiment that was done under the same facts; ``None``: there are none.

    Where quick ones are asked for, those of a full measurement count, and come first.
    """
    for size in (False, True) if quick else (False,):
        try:
            held = json.loads(_file(known, experiment, size).read_text())
            entry, figures = dict(held["entry"]), list(held["figures"])
            broken = any(wrong_in_figure(figure, {experiment.name}) for figure in figures)
            if not broken and held["facts"] == json.loads(json.dumps(known)) and entry["made"]:
                return {"entry": entry, "figures": figures}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def keep(
    known: Mapping[str, Any],
    experiment: Experiment,
    quick: bool,
    entry: dict[str, Any],
    figures: list[dict[str, Any]],
) -> None:
    """Keep what was measured. A folder that cannot be written costs the next one its time, and nothing else."""
    with suppress(OSError):
        file = _file(known, experiment, quick)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"entry": entry, "figures": figures, "facts": known}, indent=2)
        write_atomically(file, (text + "\n").encode())
