"""From rows to a result, tables and a verdict; rows of several commands become one result of one machine."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bars import MAX_SPREAD, WITHIN_S, Figures, Row, gpu_bars, held_against
from parts import columns

NOT_SLOWER, START_RATIO, START_S = 1.0, 1.3, 15.0
CPU_WORK = {"lenet-epoch": "LeNet, an epoch", "resnet18": "ResNet-18, 60 steps"}


def cpu_checks(rows: Sequence[Row], works: Mapping[str, str] = CPU_WORK) -> list[Row]:
    """Judge the comparisons on the CPU: kway is slower where the ratio is above 1 by more than half its spread.

    ``works``: their titles by name.
    """
    found = {(row["work"], row["k"]): row for row in rows if row.get("kind") == "case"}
    checks = []
    for work, title in works.items():
        for k in (1, 2):
            row = found.get((work, k))
            bar = f"at most {NOT_SLOWER:.2f}, within half the spread"
            name = f"{title}, CPU, {k} rank{'' if k == 1 else 's'}: kway / by hand"
            checks.append(_check(name, bar, None if row is None else row["ratio"]))
            if row is not None:
                passed = row["ratio"] - row["ratio_spread"] / 2 <= NOT_SLOWER
                checks[-1].update(passed=passed, settled=row["settled"], spread=row["ratio_spread"])
    return checks


def start_checks(rows: Sequence[Row]) -> list[Row]:
    """Judge the starts: on 2 CPU ranks by the ratio, on 4 GPUs by the seconds."""
    found = {(row["device"], row["k"]): row for row in rows if row.get("kind") == "start"}
    cpu, gpu = found.get(("cpu", 2)), found.get(("cuda", 4))
    name = "start, 2 CPU ranks: kway train lenet / by hand"
    one = _check(name, f"at most {START_RATIO:.2f}", cpu and cpu["ratio"])
    if cpu is not None:
        spread = cpu["ratio_spread"]
        settled = spread is not None and spread <= MAX_SPREAD
        one.update(passed=cpu["ratio"] <= START_RATIO, settled=settled, spread=spread)
    # Seconds, against a bar in seconds: far from it or not, a spread says nothing more.
    other = _check("start, 4 GPUs, nothing compiled, seconds", f"below {START_S:.0f}", gpu and gpu["kway_s"])
    if gpu is not None:
        other.update(passed=max(gpu["s_of_rounds"]["kway"]) < START_S, settled=True)
    return [one, other]


def _check(name: str, bar: str, value: float | None) -> Row:
    return {"check": name, "bar": bar, "judged": True, "ratio": value, "passed": None, "settled": None}


def machine_checks(rows: Sequence[Row]) -> list[Row]:
    """Judge whether rows may be compared: GPUs of one machine, measured within an hour."""
    machines = [row for row in rows if row.get("part") == "machine" and "cluster" in row]
    seen = {frozenset(gpu["uuid"] for gpu in row["cluster"]["gpus"]) for row in machines}
    # A part may have seen only some of a machine's GPUs.
    identities = [gpus for gpus in seen if not any(gpus < other for other in seen)]
    times = [row["at"] for row in rows if "at" in row and not _is_cpu(row)]
    checks = []
    if times:
        one = _check("GPU rows of one machine, machines", "1", len(identities))
        hour = _check("GPU rows within, seconds", f"at most {WITHIN_S:.0f}", max(times) - min(times))
        checks = [
            {**one, "passed": len(identities) == 1, "settled": True},
            {**hour, "passed": hour["ratio"] <= WITHIN_S, "settled": True},
        ]
    return checks


def _is_cpu(row: Row) -> bool:
    return row["part"] == "machine-cpu" or row["part"].startswith("cpu-") or row["part"] == "kway-smoke"


def end_checks(rows: Sequence[Row], own: tuple[str, ...] = ("kway", "cpu", "start", "machine")) -> list[Row]:
    """Judge that kway's own parts ended well, the last try of each. What others failed at is a missing figure.

    ``own``: how the names of parts begin that are judged.
    """
    ends = {(row["part"], row["k"]): row for row in rows if row.get("kind") == "end"}
    return [
        {
            **_check(f"{part}, k={k}: exit code", "0", row["exit_code"]),
            "passed": row["exit_code"] == 0,
            "settled": True,
        }
        for (part, k), row in sorted(ends.items())
        if part.startswith(own)
    ]


def summarise(rows: list[Row], judge: bool = True) -> tuple[dict[str, Any], str, bool]:
    """Return the result as JSON data, tables for people, and whether nothing failed of what was measured.

    What fails: a judged bar that is missed or whose figures have not settled, a part of kway's that broke, rows
    of more than one machine or of more than an hour. ``judge=False``: only that parts ended well.
    """
    figures = Figures(rows)
    checks = [*machine_checks(rows), *end_checks(rows)]
    if judge:
        checks += [held_against(bar, figures) for bar in gpu_bars()]
        checks += [*cpu_checks(rows), *start_checks(rows)]
    kinds = {"kway": "train", "others": "yardstick", "cpu": "case", "starts": "start", "ends": "end"}
    result = {
        "machines": [
            row for row in rows if row.get("part") in ("machine", "machine-cpu") and "versions" in row
        ],
        "ratio": "kway's time over the other's, both medians over the epochs after the warm-up",
        "spread": "(max - min) / median, from ten values on over the medians of five consecutive blocks",
        "checks": checks,
        **{name: [row for row in rows if row.get("kind") == kind] for name, kind in kinds.items()},
        "left_out": [row for row in rows if row.get("kind") in ("left out", "failed")],
    }
    wrong = [
        check
        for check in checks
        if check["judged"] and (check["passed"] is False or check["settled"] is False)
    ]
    return result, f"{_times(figures)}\n\n{_verdicts(checks)}", not wrong


def _times(figures: Figures) -> str:
    """Epoch, step and waiting for input of every way of kway's, then the others' epochs."""
    lines = [["", "k", "s an epoch", "spread", "ms a step", "waited for input, s"]]
    for row in figures.kway:
        step = row["step_s"]
        lines.append(
            [
                f"kway {row['way']}"
                + (f" (ran {row['step_kind']})" if f":{row['step_kind']}:" not in row["way"] else ""),
                str(row["k"]),
                f"{row['epoch_s']:.4f}",
                _percent(row["epoch_s_spread"]),
                "-" if step is None else f"{step * 1e3:.3f}",
                f"{row['input_wait_s']:.3f}",
            ]
        )
    peers = dict.fromkeys((row["what"], row["k"]) for row in figures.others if "s_epoch" in row)
    for what, k in peers:
        figure = figures.peer(what, k)
        if figure is not None:
            lines.append([what, str(k), f"{figure.seconds:.4f}", _percent(figure.spread), "-", "-"])
    return columns(lines)


def _verdicts(checks: list[Row]) -> str:
    words = {True: "pass", False: "MISS", None: "not measured"}
    lines = [["", "check", "value", "bar", ""]]
    for check in checks:
        word = words[check["passed"]]
        value = check["ratio"]
        lines.append(
            [
                word if check["judged"] or check["passed"] is None else f"({word})",
                check["check"],
                "-" if value is None else f"{value:.4g}",
                check["bar"],
                "NOT settled" if check["settled"] is False else "",
            ]
        )
    return columns(lines)


def _percent(spread: float | None) -> str:
    return "-" if spread is None else f"{spread:.1%}"
