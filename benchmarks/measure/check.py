"""Holds figures of ``kway measure`` against the same things timed by hand, on one machine in one run; see README.md."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import by_hand
import repeat
import torch

import kway
from kway.errors import KwayError, UsageError
from kway.measurements import Measurements

GIB, MIB = 1 << 30, 1 << 20
WORST = 10


@dataclass(frozen=True)
class Case:
    """A figure of the record, and what gives the same by hand; ``most``: by which part they may differ."""

    name: str
    most: float
    figure: tuple[str, str]
    parameters: dict[str, Any]
    hand: Callable[[], float]


@dataclass(frozen=True)
class Row:
    """``ratio``: kway / by hand; ``passed`` is ``None`` where the figure is missing."""

    name: str
    kway: float | None
    spread: float | None
    hand: float
    ratio: float | None
    most: float
    passed: bool | None


def cases(gpus: int, cpu_ranks: int, smoke: bool) -> list[Case]:
    """Return what is held against what: on GPUs, or small on CPU where it is only tried whether this runs."""
    if smoke:
        ends = "cpu", "cpu"
        wanted = [("cpu", "pageable", ends)]
        product, device, dtype = 256, "cpu", "fp32"
        ranks, size, backend, kind = cpu_ranks, 16 * MIB, "gloo", "CPU ranks"
    else:
        memory = "pinned, non-blocking"
        wanted = [
            (way, memory, ends) for way, ends in (("in", ("cpu", "cuda:0")), ("out", ("cuda:0", "cpu")))
        ]
        product, device, dtype = 8192, "cuda:0", "bf16"
        ranks, size, backend, kind = gpus, GIB, "nccl", "GPUs"
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    found = [
        Case(
            f"product, {dtype}, n {product}", 0.03, ("compute", "matrix product"),
            {"device": device, "dtype": dtype, "n": product},
            partial(by_hand.best_product, device, types[dtype], product),
        )
    ]  # fmt: skip
    found += [
        Case(
            f"copy {way}, {memory}, 64 MiB", 0.05, ("copies", "copy"),
            {"from": ends[0], "to": ends[1], "memory": memory, "bytes": 64 * MIB},
            partial(by_hand.copied, *ends, 64 * MIB),
        )
        for way, memory, ends in wanted
    ]  # fmt: skip
    if ranks > 1:
        found.append(
            Case(
                f"all-reduce, {backend}, {ranks} ranks, {size // MIB} MiB: bus bandwidth", 0.03,
                ("collectives", f"bus bandwidth, {backend} on {ranks} {kind}"),
                {"collective": "all-reduce", "bytes": size, "ranks": ranks},
                partial(by_hand.all_reduced, backend, ranks, size),
            )
        )  # fmt: skip
    return found


def held(record: Measurements, case: Case) -> Row:
    """Time a case by hand and hold the record's figure against it."""
    hand = case.hand()
    figures = record.find(*case.figure, **case.parameters)
    if not figures:
        return Row(case.name, None, None, hand, None, case.most, None)
    value, spread = figures[0]["value"], figures[0]["spread"]
    ratio = value / hand
    return Row(case.name, value, spread, hand, ratio, case.most, abs(ratio - 1) <= case.most)


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row."""
    lines = []
    for row in rows:
        verdict = {True: "ok", False: "MISSED", None: "NOT MEASURED"}[row.passed]
        text = f"{row.name}: by hand {row.hand:.4g}"
        if row.ratio is not None:
            text += f", kway {row.kway:.4g} (spread {row.spread:.1%}), ratio {row.ratio:.4f} (1 +- {row.most:.2f})"
        lines.append(f"{text}: {verdict}")
    return "\n".join(lines)


def compared(before: Measurements, now: Measurements) -> tuple[dict[str, Any], str]:
    """Return how far two records agree, as data and as lines."""
    found = repeat.pairs(before.figures, now.figures)
    share = repeat.agreeing(found)
    worst = [pair for pair in found if not pair.agrees][:WORST]
    lines = [
        f"repeated: {share:.1%} of {len(found)} figures agree within their spreads (at least {repeat.BAR:.0%})"
    ]
    lines += [
        f"  {pair.name}: {pair.before:.4g}, then {pair.now:.4g}: {pair.apart:.1f} times what their spreads allow"
        for pair in worst
    ]
    return {"share": share, "figures": len(found), "worst": [asdict(pair) for pair in worst]}, "\n".join(
        lines
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure, time by hand, compare; return 1 where a bar is missed or a figure is not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for measurements.json and check.json")
    parser.add_argument("--devices", default="auto", help="as for kway measure")
    parser.add_argument(
        "--full", action="store_true", help="all sizes; without, those of kway measure --quick"
    )
    parser.add_argument("--repeat-after", type=Path, help="an earlier measurements.json of this machine")
    parser.add_argument(
        "--smoke", action="store_true", help="small, on CPU, judged by nothing: does it run at all"
    )
    args = parser.parse_args(words)
    before = Measurements.load(args.repeat_after) if args.repeat_after else None
    if not args.smoke and not torch.cuda.is_available():
        raise UsageError("no GPU here", "the bars are those of GPUs", "use --smoke to try it on CPU")
    experiments = {case.figure[0] for case in cases(2, 2, args.smoke)}
    if before is not None:
        experiments |= {entry["name"] for entry in before.experiments if entry["how"] != "left"}
    args.out.mkdir(parents=True, exist_ok=True)
    record = kway.measure(
        devices="cpu:2" if args.smoke else args.devices,
        only=sorted(experiments),
        quick=not args.full,
        refresh=True,
        say=lambda text: print(text, flush=True),
    )
    record.save(args.out)
    gpus = sum(device != "cpu" for device in record.devices)
    rows = [held(record, case) for case in cases(gpus, 2, args.smoke)]
    print(table(rows))
    data: dict[str, Any] = {
        "smoke": args.smoke,
        "rows": [asdict(row) for row in rows],
        "notices": record.notices,
    }
    ok = all(row.passed for row in rows)
    if before is not None:
        data["repeated"], text = compared(before, record)
        print(text)
        ok = ok and data["repeated"]["share"] >= repeat.BAR
    (args.out / "check.json").write_text(json.dumps(data, indent=1) + "\n")
    if args.smoke:
        # A figure that is not there is wrong on any machine; by how much two differ is not judged here.
        return 0 if all(row.passed is not None for row in rows) else 1
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KwayError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
