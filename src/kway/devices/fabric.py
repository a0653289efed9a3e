"""What connects the devices of this machine, and machines with each other, and the row of the table that follows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kway.backends import ETHERNET, NVLINK, PCIE, choose, lacking

_WHY = {
    ("cpu", "gloo"): "collectives between CPU ranks of torch go over Gloo",
    ("cuda", "nccl"): "collectives between GPUs go over NCCL, straight from GPU to GPU",
    ("cpu", "mpi"): "this torch has no Gloo, and MPI alone: kway cannot start ranks over it",
    ("cuda", "mpi"): "this torch has no NCCL, and MPI alone: kway cannot start ranks over it",
}
# As links between GPUs are named (``over``), by their makers' drivers.
_FAST = {"nvlink", "xgmi"}


class Surroundings(NamedTuple):
    """What is beside processors and GPUs: see ``numa.nodes``, ``networks`` and ``mps.read``."""

    numa: Sequence[dict[str, Any]] = ()
    infiniband: Sequence[dict[str, Any]] = ()
    interfaces: Sequence[dict[str, Any]] = ()
    mps: dict[str, Any] | None = None


def between_local_gpus(links: Iterable[Mapping[str, Any]]) -> str:
    """Return what connects the GPUs of this machine: NVLink where each pair has it, else PCIe; one GPU has its slot."""
    kinds = {link["over"] for link in links}
    return NVLINK if kinds and kinds <= _FAST else PCIE


def backend(kind: str, over: str, beyond: str, has: Mapping[str, bool] | None) -> dict[str, str]:
    """Return what carries collectives between ranks on ``kind``, which reach each other ``over`` this.

    ``beyond``: what connects them with those of other machines. ``name`` (``none`` where torch has nothing for them)
    and ``why``; where a row of the table applied also ``over``, ``rule`` and ``between_machines``.
    """
    here, there = choose(kind, over, has), choose(kind, beyond, has)
    if here is None or there is None:
        return {"name": "none", "why": lacking(kind)}
    name = here.rule.backend
    why = _WHY[kind, name]
    return {"name": name, "why": why, "over": over, "rule": here.text, "between_machines": there.text}


# Ranks of one machine talk over its loopback interface, which is the internet protocol as over Ethernet.
LOCAL_CPUS = ETHERNET
