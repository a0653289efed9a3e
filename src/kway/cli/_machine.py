"""Lines about a machine beside its devices: links to others, attributes, checks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kway.records import Cluster

_WIDTH = 38


def surroundings(cluster: "Cluster") -> Iterator[str]:
    """Yield what there is of NUMA nodes, InfiniBand, interfaces and Apple's GPU; nothing about what is not there."""
    from kway.units import bytes_text

    for node in cluster.numa if len(cluster.numa) > 1 else ():
        near = [f"cuda:{gpu['index']}" for gpu in cluster.gpus if gpu["numa_node"] == node["node"]]
        beside = f", {', '.join(near)}" if near else ""
        yield (
            f"NUMA {node['node']:<5}processors {node['processors'] or 'none'}, "
            f"{bytes_text(node['memory_total'])}{beside}"
        )
    for port in cluster.infiniband:
        carries = "" if port["layer"] == "InfiniBand" else f", carries {port['layer']}"
        yield f"IB        {port['device']} port {port['port']}: {port['state']}, {port['rate'] or '?'}{carries}"
    for interface in cluster.interfaces:
        yield f"network   {interface['name']}: {interface['kind']}{_bits(interface['bits_s'])}"
    if cluster.mps is not None:
        memory = bytes_text(cluster.mps["memory_total"])
        yield f"MPS       {cluster.mps['name']}, {memory} shared with the CPU: {cluster.mps['why']}"


def _bits(rate: int | None) -> str:
    return "" if rate is None else f", {rate / 1e9:g} Gbit/s"


def attributes(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the attributes of each device, one a line; devices of which all are the same together."""
    alike: list[tuple[list[str], Mapping[str, Any]]] = []
    for device, facts in found.items():
        same = next((names for names, others in alike if others == facts), None)
        if same is None:
            alike.append(([device], facts))
        else:
            same.append(device)
    for names, facts in alike:
        yield ""
        yield f"attributes of {', '.join(names)}" + ("" if facts else ": none told")
        for name, value in facts.items():
            yield f"  {_label(name):<{_WIDTH}}{_value(name, value)}"


def _label(name: str) -> str:
    """Return the name without its unit, which the value shows."""
    for end, word in (("_bytes_s", "_rate"), ("_bytes", ""), ("_hz", "")):
        if name.endswith(end):
            name = name.removesuffix(end) + word
            break
    words = name.replace("_", " ")
    # Levels of a cache.
    return words.capitalize() if words[:1] == "l" and words[1:2].isdigit() else words


def _value(name: str, value: Any) -> str:
    from kway.units import bytes_text, rate_text

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ("." if name == "compute_capability" else " ").join(map(str, value))
    if name.endswith("_bytes"):
        return bytes_text(value)
    if name.endswith("_bytes_s"):
        return rate_text(value, "B/s")
    return f"{value / 1e6:,.0f} MHz" if name.endswith("_hz") else str(value)


def checks(found: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a line a check, one more for what to do, and how many had which outcome."""
    for check in found:
        yield f"{check['outcome']:<6}{check['name']:<17}{check['found']}"
        if check["do"]:
            yield f"{'':<6}{'':<17}to do: {check['do']}"
    outcomes = [check["outcome"] for check in found]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("ok", "warn", "fail"))
    yield f"{len(found)} checks: {counts}"
