"""What collectives take on a machine that is described: steps times latency, and bytes over the slower of two links.

``n`` ranks are ``N`` nodes of ``g`` GPUs each. A collective of ``S`` bytes (as ``kway.measuring.collectives`` counts
them) goes in two stages: each GPU exchanges with the others of its node over the link between GPUs, and with the GPUs
of its number in the other nodes over its own network card, of the ``1 / g`` that is its part. Messages are cut into
pieces, so both stages run at once, and the slower one decides:

    seconds = begin + steps * hop + max(bytes between GPUs / bandwidth, bytes over the network / bandwidth)

Bytes and steps of a ring: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005; by hierarchy: Jia et al., "Highly scalable deep learning training system with mixed-precision", 2018. For
one node they are those of nccl-tests' bus bandwidth (doc/PERFORMANCE.md there). Between nodes a tree takes fewer steps:
Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009. Short messages
take another way than long ones, with less latency and less bandwidth: as NCCL does, the faster is taken. The host takes
its time to begin one, whatever its size.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from kway.elsewhere.description import Machine
from kway.measuring.collectives import ALL_REDUCE, ORDERED, POINT_TO_POINT, WIDTH, elements_of


class Stage(NamedTuple):
    """What one rank sends over one kind of link: a part of the size, in so many steps one after the other."""

    part: float
    steps: int


class Way(NamedTuple):
    """One way to do a collective: between the GPUs of a node, and between nodes; ``tree``: as a tree between nodes."""

    within: Stage
    between: Stage
    tree: bool = False


NONE = Stage(0.0, 0)


def ranks_within(machine: Machine, ranks: int) -> tuple[int, int]:
    """Return (GPUs of a node, nodes) that so many ranks are on: whole nodes where there are several.

    Raises ``ValueError`` for numbers that fill no nodes, and for more ranks than GPUs.
    """
    if ranks <= machine.gpus:
        return ranks, 1
    if ranks % machine.gpus or ranks > machine.total:
        raise ValueError(f"{ranks} ranks on {machine.nodes} nodes of {machine.gpus} GPUs")
    return machine.gpus, ranks // machine.gpus


def counts(machine: Machine) -> list[int]:
    """List the numbers of ranks that are estimated: all up to one node, then nodes doubling, and all of them."""
    nodes = [1 << k for k in range(1, machine.nodes.bit_length()) if 1 << k <= machine.nodes]
    more = sorted({*(each * machine.gpus for each in nodes), machine.total})
    return [*range(2, machine.gpus + 1), *(count for count in more if count > machine.gpus)]


def _all_reduce(g: int, n: int) -> list[Way]:
    within = Stage(2 * (g - 1) / g, 2 * (g - 1))
    return [
        Way(within, Stage(2 * (n - 1) / n / g, 2 * (n - 1))),
        Way(within, Stage(2 / g, 2 * _levels(n)), tree=True),
    ]


def _shared(g: int, n: int) -> list[Way]:
    """All-gather and reduce-scatter, which are each other backwards."""
    return [Way(Stage((g - 1) / g, g - 1), Stage((n - 1) / n / g, n - 1))]


def _all_to_all(g: int, n: int) -> list[Way]:
    # All at once; who is in another node is reached over this rank's own card.
    return [Way(Stage((g - 1) / (g * n), int(g > 1)), Stage((n - 1) / n, int(n > 1)))]


def _broadcast(g: int, n: int) -> list[Way]:
    within = Stage(float(g > 1), g - 1)
    return [Way(within, Stage(1 / g, n - 1)), Way(within, Stage(1 / g, _levels(n)), tree=True)]


def _point_to_point(g: int, n: int) -> list[Way]:
    # The last one of a node has its neighbour in the next one.
    return [Way(Stage(float(g > 1), int(g > 1)), Stage(float(n > 1), int(n > 1)))]


def _levels(nodes: int) -> int:
    return math.ceil(math.log2(nodes))


WAYS: dict[str, Callable[[int, int], list[Way]]] = {
    ALL_REDUCE: _all_reduce,
    "all-gather": _shared,
    "reduce-scatter": _shared,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
    POINT_TO_POINT: _point_to_point,
}


def seconds(machine: Machine, collective: str, ranks: int, size: int) -> float:
    """Return the seconds of a collective of ``size`` bytes among the first ``ranks`` GPUs. Raises ``ValueError``."""
    sent = elements_of(size, ranks) * WIDTH
    if collective == ORDERED:
        return _ordered(machine, ranks, sent)
    return _of(machine, collective, ranks, sent)


def _of(machine: Machine, collective: str, ranks: int, sent: int) -> float:
    g, n = ranks_within(machine, ranks)
    ways = [way._replace(between=NONE) if n == 1 else way for way in WAYS[collective](g, n)]
    software = machine.software
    short = min(_taken(machine, way, sent, software["short_share"], "hop_s") for way in ways)
    long = min(_taken(machine, way, sent, 1.0, "long_hop_s") for way in ways)
    return float(max(software["call_s"], min(software["begin_s"] + short, software["long_begin_s"] + long)))


def _taken(machine: Machine, way: Way, sent: int, share: float, hop: str) -> float:
    """Return latency and bytes of one way, without its begin. ``share``: of the bandwidth."""
    peer, reached = machine.peer, machine.reached
    latency = way.within.steps * peer[hop]
    slowest = way.within.part * sent / (peer["bandwidth"] * reached["peer"])
    if way.between.steps:
        network = machine.network or {}
        latency += way.between.steps * network["tree_hop_s" if way.tree and hop == "hop_s" else hop]
        slowest = max(slowest, way.between.part * sent / (network["bandwidth"] * reached["network"]))
    return float(latency + slowest / share)


def _ordered(machine: Machine, ranks: int, sent: int) -> float:
    """Return the seconds of kway's sum in one order: slices go to their ranks, are added there, and are gathered.

    In a GPU's memory the vector is read and written once before, its slices are added (two read, one written, for each
    of ``ranks - 1`` additions), and the sum is there at the end.
    """
    in_memory = (2 + 3 * (ranks - 1) / ranks) * sent / machine.memory_s
    launches = (2 + ranks - 1) * machine.software["launch_s"]
    sending = _of(machine, "all-to-all", ranks, sent) + _of(machine, "all-gather", ranks, sent)
    return float(sending + max(in_memory, launches))


def link_limit(machine: Machine, ranks: int) -> float:
    """Return what the links of a rank carry each way: of its own and, of several nodes, of all cards of its node."""
    g, n = ranks_within(machine, ranks)
    own = float(machine.peer["bandwidth"])
    return own if n == 1 or machine.network is None else min(own, g * float(machine.network["bandwidth"]))
