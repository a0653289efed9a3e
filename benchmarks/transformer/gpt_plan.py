"""Which parts are measured on k devices, what matters most first, and which of them again: no measuring here."""

import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent)]

from parts import Part, Row  # noqa: E402
from shares import CPU_WORK, is_settled  # noqa: E402

SIDES = ("kway", "hand")
KWAY_FIRST, KWAY_MORE = "loose:compiled-graph", ("math:compiled-graph", "loose:compiled", "math:compiled")
# As one function a large model takes minutes to compile; its blocks, which are alike, take seconds.
HAND_FIRST = {"774m": "compiled-graph:blocks"}
HAND = (
    "compiled-graph:whole",
    "compiled-graph:apart",
    "compiled-graph:blocks",
    "compiled:whole",
    "compiled:blocks",
)
LIMITS = {"124m": 120.0, "355m": 180.0, "774m": 240.0}


def gpu_parts(k: int, sizes: Sequence[str], yardstick: Path | None) -> list[Part]:
    """List the parts on k GPUs. Without ``yardstick``, its folder, that part is left out."""
    found = [machine("machine"), Part("peak", [str(HERE / "peak.py")], 60)]
    # First what a bar is held against; what is compiled once is quick to compile again.
    for size in sizes:
        found += [side(which, size, ways_of(which, size)[:1], k) for which in SIDES]
    if yardstick is not None:
        names = ",".join(sizes)
        command = [str(HERE / "yardstick_part.py"), str(yardstick), "--sizes", names]
        found.append(Part("yardstick", command, 180, torchrun(k)))
    for size in sizes:
        found += [side(which, size, ways_of(which, size)[1:], k, "-more") for which in SIDES]
    return found


def ways_of(which: str, size: str) -> list[str]:
    """List the ways of one side, first the one that is held against a bar if there is time for no other."""
    if which == "kway":
        return [KWAY_FIRST, *KWAY_MORE]
    first = HAND_FIRST.get(size, HAND[0])
    return [first, *(way for way in HAND if way != first)]


def side(which: str, size: str, ways: Sequence[str], k: int, name: str = "") -> Part:
    """Take the steps of one size in these ways, by ``kway`` or by ``hand``."""
    command = [str(HERE / f"{which}_part.py"), *(f"{size}:{way}" for way in ways), "--k", str(k)]
    # kway starts its ranks itself.
    launcher = torchrun(k) if which == "hand" and k > 1 else ()
    return Part(f"{which}-{size}{name}", command, LIMITS[size], launcher)


def torchrun(k: int) -> tuple[str, ...]:
    """Start k ranks."""
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={k}")


def cpu_parts(k: int, seconds: float) -> list[Part]:
    """List the comparisons on k CPU ranks; ``seconds`` for each at most."""
    script = str(HERE.parent / "speed/cpu_part.py")
    return [
        machine("machine-cpu"),
        *(
            Part(
                f"cpu-{work}",
                [script, work, "--k", str(k), "--max-seconds", str(seconds)],
                2 * seconds + 60,
            )
            for work in CPU_WORK
        ),
    ]


def smoke_parts(k: int) -> list[Part]:
    """List what says on the CPU whether the scripts run at all."""
    own = [str(HERE / "kway_part.py"), "smoke:loose:eager", "smoke:math:eager", "--k", str(k), "--cpu"]
    hand = [str(HERE / "hand_part.py"), "smoke:eager:none", "--k", str(k), "--cpu", "--seconds", "0"]
    rounds = [str(HERE.parent / "speed/cpu_part.py"), "tiny-gpt", "--k", str(k), "--max-seconds", "5"]
    return [
        machine("machine-cpu"),
        Part("peak", [str(HERE / "peak.py"), "--cpu"], 60),
        Part("kway-smoke", own, 120),
        Part("hand-smoke", hand, 120, torchrun(k) if k > 1 else ()),
        Part("cpu-smoke", rounds, 120),
    ]


def machine(name: str) -> Part:
    """Say what is measured on, as benchmarks/seeds does."""
    return Part(name, [str(HERE.parent / "seeds/kway_part.py"), "machine"], 60)


def again(part: Part, k: int, rows: Sequence[Row]) -> Part | None:
    """Return what of a part must be measured again, from all its rows so far; ``None`` where all has settled."""
    which, _, size = part.name.removesuffix("-more").partition("-")
    if which not in SIDES:
        return None
    settled: dict[str, bool] = {}
    for row in rows:
        if row.get("kind") == which:
            # As it was asked for: kway may have run something simpler.
            way = row["way"].partition(":")[2] if "way" in row else f"{row['step_kind']}:{row['compiled']}"
            settled[way] = settled.get(way, False) or is_settled(row)
    ways = [way for way, ok in settled.items() if not ok]
    return side(which, size, ways, k, "-more" if part.name.endswith("-more") else "") if ways else None
