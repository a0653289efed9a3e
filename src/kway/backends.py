"""Which back end carries the collectives of ranks: a table of rules as plain data, and the row that applies."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kway.errors import UsageError

GPUS, CPUS, ANY = "GPUs", "CPUs", "anything else"
NVLINK, PCIE, INFINIBAND, ETHERNET = "NVLink", "PCIe", "InfiniBand", "Ethernet"
IP_OVER_INFINIBAND, ANYTHING = "IP over InfiniBand", "any link"


class Rule(NamedTuple):
    """Ranks on ``devices`` that reach each other ``over`` this talk through ``backend``, torch's name of it."""

    devices: str
    over: str
    backend: str


# The first row that fits, and whose back end torch has, applies. NVLink stands for AMD's Infinity Fabric (XGMI) too,
# NCCL for RCCL, which takes its place in builds for ROCm. Loopback and RDMA over Ethernet count as Ethernet.
RULES = (
    Rule(GPUS, NVLINK, "nccl"),
    Rule(GPUS, PCIE, "nccl"),
    Rule(GPUS, INFINIBAND, "nccl"),
    Rule(GPUS, ETHERNET, "nccl"),
    Rule(CPUS, ETHERNET, "gloo"),
    Rule(CPUS, IP_OVER_INFINIBAND, "gloo"),
    Rule(ANY, ANYTHING, "mpi"),
)
TITLES = {"nccl": "NCCL", "gloo": "Gloo", "mpi": "MPI"}
# By the type of a torch device. GPUs of ROCm builds have the type cuda.
GROUPS = {"cuda": GPUS, "cpu": CPUS}
# What a torch has that nobody has asked yet: MPI is only in builds from source.
USUAL = {"nccl": True, "gloo": True, "mpi": False}


class Choice(NamedTuple):
    """The row that applied and its ``number`` in the table, from 1."""

    number: int
    rule: Rule

    @property
    def text(self) -> str:
        """The row as it is printed."""
        devices, over, backend = self.rule
        return f"rule {self.number}: {devices} over {over} -> {TITLES[backend]}"


def choose(kind: str, over: str | None = None, has: Mapping[str, bool] | None = None) -> Choice | None:
    """Return the row for ranks on devices of type ``kind`` (``cpu``, ``cuda``), ``None`` where none applies.

    ``over``: what connects them; ``None`` where that is not known: rows of the same devices have the same back end.
    ``has``: which back ends torch has, by name; ``None``: those of usual builds.
    """
    has = USUAL if has is None else has
    for number, rule in enumerate(RULES, 1):
        fits = rule.devices == ANY or (rule.devices == GROUPS.get(kind) and over in (None, rule.over))
        if fits and has.get(rule.backend, False):
            return Choice(number, rule)
    return None


def backend_of(devices: Iterable[str], has: Mapping[str, bool] | None = None) -> str:
    """Name the back end for ranks on these torch devices, one a rank, by the table.

    Raises ``UsageError`` where no row applies: ranks on devices of several types, or a torch without what they need.
    """
    kinds = sorted({device.partition(":")[0] for device in devices}) or ["cpu"]
    choice = choose(kinds[0] if len(kinds) == 1 else "mixed", None, has)
    if choice is None:
        raise UsageError(
            f"no back end for collectives between {' and '.join(kinds)} ranks",
            lacking(kinds[0]) if len(kinds) == 1 else "all ranks are on CPUs or all on GPUs",
            "kway devices says which one each kind of device has",
        )
    return choice.rule.backend


def lacking(kind: str) -> str:
    """Say what torch would have to have for ranks on devices of type ``kind``."""
    names = {rule.backend for rule in RULES if rule.devices in (GROUPS.get(kind), ANY)}
    return f"this torch has neither of {' and '.join(TITLES[name] for name in TITLES if name in names)}"
