"""Plans for machines that are not here: the model profiled on this one, and scaled; the figures from a description."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kway.cost.collectives import measured_ranks
from kway.devices import busy
from kway.devices.topology import discover
from kway.elsewhere.machine import elsewhere
from kway.elsewhere.moving import moved
from kway.errors import UsageError
from kway.jobs.asked import Asked
from kway.jobs.given import workloads_given
from kway.jobs.known_costs import Known, profiled
from kway.jobs.measuring import measure
from kway.measurements import Measurements
from kway.planning import doubts
from kway.planning.candidates import device_sets
from kway.records import Cluster
from kway.strategies.layout import AUTO

# What tells how fast this machine is, to compare the other one with.
RATES = ("compute", "copies")


def known_elsewhere(
    asked: Asked, there: Measurements, workload: Any, refresh: bool, say: Callable[[str], None]
) -> Known:
    """Return what a plan for the machine of ``there`` rests on. ``workload``: of this machine, in place of a profile.

    The model is profiled on a GPU here where there is one, else on the CPU. Raises ``UsageError`` where this machine
    lacks a rate that the model is scaled by.
    """
    cluster = discover()
    here = replace(asked, cluster=cluster, sets=device_sets(cluster))
    given = list(workloads_given(workload, here).values())
    own = given[0] if given else profiled(here, here.device_types[0], say, refresh, None)
    rates = measure(only=RATES, quick=True, refresh=refresh, say=say)
    there_is = moved(own, rates, there)
    beside = [
        *doubts.said(
            [*doubts.of_profile(own, bool(given)), *doubts.of_measurements(rates.experiments, given=False)]
        ),
    ]
    # What was said before the profile was of its moment, not of this one.
    lines = [line for line in there_is.notices if line not in busy.said(own.busy)]
    return Known(
        {"cuda": there_is},
        {"cuda": there},
        tuple(dict.fromkeys([*there.notices, *lines, *beside])),
        given=["cuda"] if given else [],
    )


def machine_there(on: Any, devices: Any) -> tuple[Cluster, Measurements, list[list[str]]]:
    """Return devices, figures and device sets of a machine that is not here.

    The sets are its GPUs, as many as its figures tell of. ``devices``: ``"auto"``, or numbers of GPUs. Raises
    ``UsageError``.
    """
    cluster, there = elsewhere(on)
    gpus = [f"cuda:{gpu['index']}" for gpu in cluster.gpus]
    counts = [1, *measured_ranks(there, "nccl")]
    if devices != AUTO:
        counts = _counts(devices, len(gpus))
    return cluster, there, [gpus[:count] for count in counts]


def _counts(devices: Any, most: int) -> list[int]:
    """Return numbers of GPUs. Raises ``UsageError`` for what is none, and for more than there are."""
    words = devices.replace(",", " ").split() if isinstance(devices, str) else devices
    found = []
    for word in words if isinstance(words, list | tuple) else [words]:
        text = str(word)
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
            raise UsageError(
                f"device set {text!r} of a machine that is not here",
                f"it must be a number of its GPUs, 1 to {most}",
                "or leave it out for all",
            )
        found.append(int(text))
    return found
