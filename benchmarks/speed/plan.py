"""Which parts are measured on k devices, what matters most first, and which of them again: no measuring here."""

import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bars import EPOCH, MAX_SPREAD, Row, settled_spread  # noqa: E402
from parts import Part  # noqa: E402

KINDS = ("eager", "compiled", "graph", "compiled-graph")
FLOOR = {"floor-bf16": "bf16", "floor-bf16w": "bf16w", "floor-fp32": "fp32"}
WAYS = {
    "kway-lenet": (
        "lenet:fp32:loose:compiled-graph:channels_last",
        "lenet:tf32:loose:compiled-graph:channels_last",
        "lenet:fp32:loose:compiled-graph:contiguous",
        "lenet:tf32:loose:compiled-graph:contiguous",
        "lenet:fp32:loose:graph:channels_last",
        "lenet:fp32:math:compiled-graph:channels_last",
        "lenet:fp32:bits:compiled-graph:channels_last",
        "lenet:fp32:loose:eager:contiguous",
    ),
    "kway-resnet18": (
        "resnet18:bf16:loose:compiled-graph:channels_last",
        "resnet18:tf32:loose:compiled-graph:channels_last",
        "resnet18:bf16:math:compiled-graph:channels_last",
        "resnet18:bf16:bits:compiled-graph:channels_last",
        "resnet18:bf16:loose:graph:channels_last",
        "resnet18:bf16:loose:eager:contiguous",
    ),
}
SMOKE_WAYS = ("lenet:fp32:loose:eager:channels_last", "lenet:fp32:math:eager:contiguous")
CPU_CASES = {"cpu-lenet": "lenet-epoch", "cpu-resnet18": "resnet18"}


def gpu_parts(k: int, data: Path, yardstick: Path, kinds: Sequence[str] = KINDS) -> list[Part]:
    """List the parts on k GPUs. The starts are measured on 4, the ways of one step by hand on 1."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={k}")
    seeds = [str(HERE.parent / "seeds/yardstick_part.py"), str(yardstick / "anchors.py")]
    steps = [str(HERE / "yardstick_part.py"), str(yardstick)]
    own = {name: [way for way in ways if way.split(":")[3] in kinds] for name, ways in WAYS.items()}
    packages = ["--packages", "accelerate,lightning", "--seconds", "2"]
    found = [
        machine(),
        *([kway_part("kway-lenet", k, own["kway-lenet"], data)] if own["kway-lenet"] else []),
        Part("peers", [*seeds, "peers", *packages], 240, torchrun),
        *([kway_part("kway-resnet18", k, own["kway-resnet18"], data)] if own["kway-resnet18"] else []),
        Part("graph", [*steps, "graph"], 150, torchrun),
    ]
    if k == 4:
        found.append(Part("scratch", [*seeds, "seeds", "--models", "lenet", "--k", str(k)], 60))
        found.append(start("start", k, ["--data", str(data), "--rounds", "3"], 150))
    if k == 1:
        found += [Part(name, [*steps, "floor", "--precisions", only], 240) for name, only in FLOOR.items()]
    return found


def cpu_parts(k: int, data: Path | None, seconds: float) -> list[Part]:
    """List the parts on k CPU ranks; ``seconds`` for each comparison at most. The start is measured on 2."""
    found = [machine("machine-cpu")]
    for name, work in CPU_CASES.items():
        command = [str(HERE / "cpu_part.py"), work, "--k", str(k), "--max-seconds", str(seconds)]
        found.append(Part(name, command, 2 * seconds + 60))
    if k == 2:
        found.append(start("cpu-start", k, ["--cpu", *(["--data", str(data)] if data else [])], 600))
    return found


def smoke_parts(k: int) -> list[Part]:
    """List what says in a minute, on the CPU, whether the scripts run at all."""
    own = [str(HERE / "kway_part.py"), *SMOKE_WAYS, "--k", str(k), "--cpu"]
    found = [
        machine("machine-cpu"),
        Part("kway-smoke", own, 120),
        Part("cpu-smoke", [str(HERE / "cpu_part.py"), "tiny", "--k", str(k), "--max-seconds", "5"], 120),
    ]
    return [*found, start("cpu-start", k, ["--cpu", "--rounds", "1"], 120)] if k == 2 else found


def machine(name: str = "machine") -> Part:
    """Say what is measured on, as benchmarks/seeds does."""
    return Part(name, [str(HERE.parent / "seeds/kway_part.py"), "machine"], 60)


def start(name: str, k: int, options: list[str], limit: float) -> Part:
    """Start-up on k devices."""
    return Part(name, [str(HERE / "starts.py"), "--k", str(k), *options], limit)


def kway_part(name: str, k: int, ways: Sequence[str], data: Path) -> Part:
    """Train in these ways on k GPUs. What is compiled for the first time takes minutes."""
    return Part(name, [str(HERE / "kway_part.py"), *ways, "--k", str(k), "--data", str(data)], 300)


def again(part: Part, k: int, rows: Sequence[Row], data: Path) -> Part | None:
    """Return what of a part must be measured again, from all its rows so far; ``None`` where all has settled."""
    if part.name in WAYS:
        spreads: dict[str, float | None] = {}
        for row in rows:
            if row.get("kind") == "train":
                spreads[row["way"]] = _least(spreads.get(row["way"]), row[f"{EPOCH}_spread"])
        ways = [way for way, spread in spreads.items() if not _is_settled(spread)]
        return kway_part(part.name, k, ways, data) if ways else None
    if part.name == "graph":
        read = [
            row for row in rows if row.get("m") == "lenet" and row.get("mode") == ("c" if k == 1 else "cr")
        ]
        times = [max(row["us"]) for row in read if min(row["us"]) > 0]
        return part if times and not _is_settled(settled_spread(times)) else None
    if part.name in ("peers", "scratch"):
        found: dict[str, float | None] = {}
        for row in rows:
            if row.get("kind") == "yardstick" and "all" in row:
                found[row["what"]] = _least(found.get(row["what"]), settled_spread(row["all"][1:]))
        return None if all(map(_is_settled, found.values())) else part
    return None


def _least(one: float | None, other: float | None) -> float | None:
    known = [spread for spread in (one, other) if spread is not None]
    return min(known, default=None)


def _is_settled(spread: float | None) -> bool:
    return spread is not None and spread <= MAX_SPREAD
