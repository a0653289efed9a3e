"""What is known of a machine that is not here: rates from data sheets, latencies, and which part of them is reached."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from kway.errors import UsageError
from kway.forms import AtLeast, OneOf
from kway.paths import check_reachable
from kway.records import Record
from kway.registry import unknown

PACKAGE, FOLDER = "kway.elsewhere", "machines"
MOST_GPUS = 1 << 14

OVER = ("nvlink", "pcie")
_RATE, _COUNT = AtLeast(0, above=True), AtLeast(1, int)
_FORMS: dict[str, Any] = {
    "nodes": _COUNT,
    "gpus": _COUNT,
    "gpu": {
        "name": str, "compute_capability": str, "memory": _RATE, "multiprocessors": _COUNT, "flops": {str: _RATE},
        "memory_bandwidth": _RATE,
    },
    "peer": {"over": OneOf(OVER), "bandwidth": _RATE, "hop_s": _RATE, "long_hop_s": _RATE},
    "slot": {"bandwidth": _RATE, "pageable_bandwidth": _RATE, "latency_s": _RATE},
    "network": ({"bandwidth": _RATE, "hop_s": _RATE, "long_hop_s": _RATE, "tree_hop_s": _RATE}, None),
    "host": {"cpu": str, "cores": _COUNT, "memory": _RATE},
    "software": {
        "launch_s": _RATE, "done_s": _RATE, "call_s": _RATE, "begin_s": _RATE, "long_begin_s": _RATE,
        "short_share": _RATE, "blocks": _COUNT,
    },
    "reached": {"flops": {str: _RATE}, "memory": _RATE, "peer": _RATE, "slot": _RATE, "network": _RATE},
}  # fmt: skip


@dataclass(frozen=True)
class Machine(Record):
    """A cluster of ``nodes`` equal machines with ``gpus`` equal GPUs each. Bytes, seconds, operations or bytes a
    second.

    ``gpu``: ``name``, ``compute_capability``, ``memory``, ``multiprocessors``, ``flops`` (by dtype name, dense
    products) and ``memory_bandwidth``. ``peer``, between GPUs of one node: ``over`` (``nvlink`` or ``pcie``),
    ``bandwidth`` of one GPU each way, ``hop_s`` and ``long_hop_s`` (a step of a collective, of short and of long
    messages). ``slot``, between CPU memory and a GPU: ``bandwidth`` each way, ``pageable_bandwidth``, ``latency_s``.
    ``network``, between nodes, or ``None`` for one node: ``bandwidth`` of one GPU each way, ``hop_s``, ``long_hop_s``
    and ``tree_hop_s``. ``host``, of one node: ``cpu`` (its name), ``cores``, ``memory``. ``software``: ``launch_s`` and
    ``done_s`` (of the smallest operation, until its call returns and until it is done), ``call_s`` (that the host takes
    to begin a collective), ``begin_s`` and ``long_begin_s`` (that one takes on the GPU, of short and long messages),
    ``short_share`` (of the bandwidth, that short messages reach) and ``blocks`` (multiprocessors that a collective
    takes). ``reached``: which part of a peak is reached: ``flops`` (by dtype name), ``memory``, ``peer``, ``slot``,
    ``network``. ``sources``: where the numbers come from. Raises ``UsageError`` for what is not of this form.
    """

    kind: ClassVar[str] = "machine"
    forms: ClassVar[Mapping[str, Any]] = _FORMS

    name: str
    made: str
    nodes: int
    gpus: int
    gpu: dict[str, Any]
    peer: dict[str, Any]
    slot: dict[str, Any]
    host: dict[str, Any]
    software: dict[str, Any]
    reached: dict[str, Any]
    sources: dict[str, str]
    network: dict[str, Any] | None = None
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem = self.wrong() or _wrong(self)
        if problem:
            raise UsageError(f"the description of a machine ({self.kind} record)", problem)

    @property
    def total(self) -> int:
        """The number of GPUs of all nodes."""
        return self.nodes * self.gpus

    def flops(self, dtype: str) -> float:
        """Return the operations a second that products of a dtype reach."""
        return float(self.gpu["flops"][dtype] * self.reached["flops"][dtype])

    @property
    def memory_s(self) -> float:
        """Bytes a second that a GPU's memory reaches, read and written both counted."""
        return float(self.gpu["memory_bandwidth"] * self.reached["memory"])


def _wrong(machine: Machine) -> str:
    """Say what is wrong with a description, or ``""``."""
    if machine.total > MOST_GPUS:
        return f"it has {machine.total} GPUs, at most {MOST_GPUS} can be planned for"
    if machine.nodes > 1 and machine.network is None:
        return f"it has {machine.nodes} nodes and no network between them"
    flops, reached = machine.gpu["flops"], machine.reached["flops"]
    if not flops or flops.keys() != reached.keys():
        return (
            f"gpu.flops has {', '.join(flops) or 'no rate'}, reached.flops has {', '.join(reached) or 'none'}"
        )
    return _wrong_shares(machine)


def _wrong_shares(machine: Machine) -> str:
    shares = {
        **{f"reached.{name}": value for name, value in machine.reached.items() if name != "flops"},
        **{f"reached.flops.{name}": value for name, value in machine.reached["flops"].items()},
        "software.short_share": machine.software["short_share"],
    }
    over = [name for name, value in shares.items() if value > 1]
    if over:
        return f"{over[0]} is {shares[over[0]]:g}: a part of the peak is at most 1"
    blocks, all_ = machine.software["blocks"], machine.gpu["multiprocessors"]
    return "" if blocks < all_ else f"software.blocks is {blocks} of {all_} multiprocessors"


def shipped() -> list[str]:
    """List the machines that kway has descriptions of, by name."""
    files = resources.files(PACKAGE).joinpath(FOLDER).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def described(text: Any) -> Machine:
    """Return the machine of that name, or of the description in the file ``text``.

    Raises ``UsageError`` for a name that is not known, and for a file that is no description.
    """
    if isinstance(text, str) and text in shipped():
        source = resources.files(PACKAGE).joinpath(FOLDER, f"{text}.json")
        return Machine.from_dict(json.loads(source.read_text()))
    if not isinstance(text, str | Path) or not str(text):
        raise UsageError(
            f"a machine of type {type(text).__name__}", "it is a name or the path of a description"
        )
    path = Path(text)
    check_reachable("machine", path)
    if isinstance(text, str) and not path.exists() and path.suffix != ".json" and len(path.parts) == 1:
        raise unknown("machine", text, shipped(), "the path of a description (machine.json)")
    return Machine.load(path)
