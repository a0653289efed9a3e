"""From the description of a machine to what ``kway devices`` and ``kway measure`` would say of it, as estimates."""

from dataclasses import replace
from typing import Any

from kway.devices.simulated import simulated
from kway.elsewhere.description import Machine, described
from kway.elsewhere.figures import NOTE, compute, copies
from kway.elsewhere.together import collectives, overlap
from kway.measurements import Measurements
from kway.records import Cluster

ESTIMATED = "estimated"
_LEFT = "it needs the machine itself"
_MADE_BY = {"compute": compute, "copies": copies, "overlap": overlap, "collectives": collectives}
_NOT = ("offload", "beside", "processes")
# Threads of the CPU beside a GPU: as kway.devices.cpu gives them.
_MOST_THREADS = 4


def elsewhere(text: Any) -> tuple[Cluster, Measurements]:
    """Return devices and figures of a machine that is not here, by its name or the path of its description.

    Every figure says that it is an estimate; names and parameters are those of ``kway measure``. Raises
    ``UsageError`` for a name that is not known, and for a file that is no description.
    """
    machine = described(text)
    return cluster_of(machine), measurements_of(machine)


def cluster_of(machine: Machine) -> Cluster:
    """Return the devices of all nodes as those of one machine, each GPU with its ``node``; links within nodes.

    ``cpu`` is that of one node.
    """
    gpu, host = machine.gpu, machine.host
    one = simulated(
        gpus=machine.gpus,
        cores=host["cores"],
        gpu_name=gpu["name"],
        gpu_memory=int(gpu["memory"]),
        memory=int(host["memory"]),
        over=machine.peer["over"] if machine.peer["over"] == "nvlink" else "host-bridge",
    )
    gpus, links = [], []
    for node in range(machine.nodes):
        first = node * machine.gpus
        for each in one.gpus:
            index = first + each["index"]
            named = {
                "index": index,
                "physical": index,
                "uuid": f"GPU-{index:08d}-0000-0000-0000-000000000000",
            }
            gpus.append({**each, **named, "compute_capability": gpu["compute_capability"], "node": node})
        links += [{**link, "a": first + link["a"], "b": first + link["b"]} for link in one.links]
    return replace(
        one, cpu={**one.cpu, "model": host["cpu"]}, gpus=gpus, links=links, warnings=[_said(machine)]
    )


def measurements_of(machine: Machine) -> Measurements:
    """Return figures of all that can be estimated; what cannot is left out, with the reason."""
    figures = [figure.to_dict() for make in _MADE_BY.values() for figure in make(machine)]
    cores = machine.host["cores"]
    return Measurements(
        machine={
            "host": machine.name,
            "cpu": machine.host["cpu"],
            "usable": cores,
            "gpus": [machine.gpu["name"]],
            "threads": max(1, min(_MOST_THREADS, cores // machine.gpus)),
            "driver": None,
            ESTIMATED: True,
        },
        versions={},
        devices=[f"cuda:{index}" for index in range(machine.total)],
        quick=False,
        made=machine.made,
        age_s=0.0,
        seconds=0.0,
        experiments=[
            *(_entry(machine, name, ESTIMATED, "") for name in _MADE_BY),
            *(_entry(machine, name, "left", _LEFT) for name in _NOT),
        ],
        figures=figures,
        notices=[
            _said(machine),
            *machine.notices,
            *(f"{name}: {text}" for name, text in machine.sources.items()),
        ],
    )


def _said(machine: Machine) -> str:
    return f"{machine.name}: {NOTE}; nothing of it was measured"


def _entry(machine: Machine, name: str, how: str, why: str) -> dict[str, Any]:
    return {
        "name": name, "how": how, "why": why, "quick": False, "made": machine.made, "age_s": 0.0, "seconds": 0.0,
        "tries": 0, "drift": 0.0, "noisy": "", "left": {}, "notes": [] if why else [NOTE],
    }  # fmt: skip
