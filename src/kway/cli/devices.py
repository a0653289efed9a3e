"""``kway devices``: what this machine has, as kway sees it."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kway.cli import _machine

if TYPE_CHECKING:
    from kway.records import Cluster

HELP = "show processors, GPUs, memory, links and back ends"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "--attributes", action="store_true", help="show each device in detail: cores, caches, clocks, limits"
    )
    parser.add_argument(
        "--doctor", action="store_true", help="check the installation instead, and say what to mend"
    )
    parser.add_argument("--json", action="store_true", help="print the record, and nothing else")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write DIR/cluster.json")


def run(args: argparse.Namespace) -> int:
    """Describe the machine; returns 0, or 1 where a check of ``--doctor`` fails.

    Raises ``UsageError`` where ``--out`` cannot take the record.
    """
    from kway.devices.topology import discover

    cluster = discover()
    if args.attributes:
        from kway.devices.attributes import describe

        cluster = replace(cluster, attributes=describe(cluster))
    fails = False
    if args.doctor:
        from kway.devices.doctor import examine, failed

        found = examine(cluster)
        fails = failed(found)
        cluster = replace(cluster, checks=[check._asdict() for check in found])
    if args.out is not None:
        write_new(cluster, args.out)
    print(cluster.to_json() if args.json else "\n".join(_shown(cluster)))
    return int(fails)


def _shown(cluster: "Cluster") -> Iterator[str]:
    if not cluster.checks:
        yield from lines(cluster)
    yield from _machine.attributes(cluster.attributes)
    yield from _machine.checks(cluster.checks) if cluster.checks else ()


def write_new(cluster: "Cluster", folder: Path) -> Path:
    """Write the record into ``folder``, made where it is missing, and return its path.

    Raises ``UsageError``, with nothing written, where the folder holds such a record or cannot be written.
    """
    from kway.errors import UsageError
    from kway.jobs.folder import claimed

    name = f"{cluster.kind}.json"
    try:
        # A run may be at work there: this takes nothing from it.
        with claimed(folder, name, alone=False) as taken:
            return cluster.save(taken)
    except OSError as error:
        raise UsageError(
            f"cannot write {folder / name}", error.strerror or str(error), "name another folder"
        ) from None


def lines(cluster: "Cluster") -> Iterator[str]:
    """Yield the readable description, line by line."""
    from kway.devices.select import parse
    from kway.units import bytes_text

    cpu, torch = cluster.cpu, cluster.torch
    yield f"CPU       {cpu['model']}: {cpu['cores']} cores, {cpu['usable']} usable logical processors"
    yield f"memory    {bytes_text(cpu['memory_total'])}, {bytes_text(cpu['memory_available'])} available"
    count = len(cluster.gpus) + len(cluster.hidden)
    why = "" if cluster.gpus else f": {cluster.backends['cuda']['why']}"
    yield f"GPUs      {len(cluster.gpus)} of {count} visible{why}" if count else f"GPUs      none{why}"
    if cluster.gpus:
        yield ""
        yield from table(
            ["device", "physical", "name", "memory", "free", "capability", "UUID"],
            [[f"cuda:{gpu['index']}", *_card(gpu)] for gpu in cluster.gpus],
        )
    if cluster.hidden:
        yield ""
        yield from table(
            ["hidden", "physical", "name", "memory", "free", "capability", "UUID"],
            [["-", *_card(gpu)] for gpu in cluster.hidden],
        )
        for why in sorted({gpu["why"] for gpu in cluster.hidden}):
            yield f"          hidden: {why}"
    if cluster.links:
        yield ""
        yield from table(*_matrix(cluster))
        yield "          brackets: no direct access, copies go through CPU memory"
    if count:
        yield ""
    yield from _machine.surroundings(cluster)
    for kind, backend in cluster.backends.items():
        yield f"{kind:<10}{backend['name']}: {backend['why']}"
        if "rule" in backend:
            beyond = backend["between_machines"]
            further = "" if beyond == backend["rule"] else f"; between machines {beyond}"
            yield f"          {backend['rule']}{further}"
    built = f"for ROCm {torch['hip']}" if torch["hip"] else f"with CUDA {torch['cuda']}"
    built = built if torch["cuda"] or torch["hip"] else "without CUDA"
    yield f"torch     {torch['version']}, built {built}" if torch["version"] else "torch     not installed"
    if torch["remembered"].get("nccl"):
        yield f"NCCL      {torch['remembered']['nccl']}"
    if cluster.driver:
        runs = f", runs CUDA {cluster.driver_cuda} at most" if cluster.driver_cuda else ""
        yield f"driver    {cluster.driver}{runs}"
    rule = "all visible GPUs" if cluster.gpus else "no GPU can be used, and one CPU device has all cores"
    yield f"auto      {', '.join(parse('auto', cluster))}: {rule}"
    for warning in cluster.warnings:
        yield f"warning: {warning}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _card(gpu: dict[str, Any]) -> list[str]:
    from kway.units import bytes_text

    sizes = [bytes_text(gpu["memory_total"]), bytes_text(gpu["memory_free"])]
    return [str(gpu["physical"]), gpu["name"], *sizes, gpu["compute_capability"] or "?", gpu["uuid"] or "?"]


def _matrix(cluster: "Cluster") -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the matrix that says what each pair of GPUs is linked over."""
    pairs = {(link["a"], link["b"]): link for link in cluster.links}
    names = [f"cuda:{gpu['index']}" for gpu in cluster.gpus]
    rows = []
    for a, name in enumerate(names):
        cells = ["-" if a == b else _link(pairs.get((min(a, b), max(a, b)))) for b in range(len(names))]
        rows.append([name, *cells])
    return ["links", *names], rows


def _link(link: dict[str, Any] | None) -> str:
    if link is None:
        return "unknown"
    text = f"{link['over']} x{link['nvlinks']}" if link["nvlinks"] else link["over"]
    return f"({text})" if link["peer"] is False else str(text)
