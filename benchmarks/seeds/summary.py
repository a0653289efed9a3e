"""From rows to a result, a table and a verdict: no measuring here, so any run can be judged again."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parts import Row, columns

LENET_ACCURACY = 0.80
LENET_SPREAD = 0.02
FIRST_LOSS_SPREAD = 1e-3
RESNET_ACCURACY = 0.90

Check = dict[str, Any]


def summarise(rows: list[Row], judge: bool = True) -> tuple[dict[str, Any], str, bool]:
    """Return the result as JSON data, a table for people, and whether every check passed.

    Of a part that ran twice with the same k, the last row counts. ``judge=False``: only that parts ended
    well and proofs pass, not what needs a whole training run.
    """
    trained = {(row["part"], row["k"]): row for row in rows if row.get("kind") == "train"}
    proofs = {(row["model"], row["precision"], row["k"]): row for row in rows if row.get("kind") == "proof"}
    others = {(row["what"], row["k"]): row for row in rows if row.get("kind") == "yardstick" and "k" in row}
    ends = {(row["part"], row["k"]): row for row in rows if row.get("kind") == "end"}
    machines = [row for row in rows if row.get("part") == "machine" and "versions" in row]
    checks = [
        *(_training_checks(trained) if judge else []),
        *_bits_checks(trained),
        *_proof_checks(proofs),
        *_end_checks(ends),
    ]
    result = {
        "machine": {key: value for key, value in machines[-1].items() if key not in ("k", "part", "cluster")}
        if machines
        else None,
        "cluster": machines[-1]["cluster"] if machines else None,
        "spread": "(max - min) / median over the epochs after the first",
        "training": list(trained.values()),
        "proofs": list(proofs.values()),
        "yardstick": list(others.values()),
        "plain": [row for row in rows if row.get("kind") == "plain"],
        "ends": list(ends.values()),
        "checks": checks,
    }
    text = "\n\n".join([_times(trained, others), _accuracies(trained), _verdicts(checks)])
    return result, text, bool(checks) and all(check["passed"] for check in checks)


def _check(name: str, value: Any, bar: str, passed: bool) -> Check:
    return {"check": name, "value": value, "bar": bar, "passed": passed}


def _training_checks(trained: dict[tuple[str, int], Row]) -> list[Check]:
    checks = []
    bars = {"lenet": LENET_ACCURACY, "resnet18": RESNET_ACCURACY, "resnet18-loose": RESNET_ACCURACY}
    for part, bar in bars.items():
        for k in _counts(trained, part):
            last = trained[part, k]["accuracy"][-1]
            checks.append(_check(f"{part} accuracy, k={k}", last, f"at least {bar:.2f}", last >= bar))
    lenets = [trained["lenet", k] for k in _counts(trained, "lenet")]
    if len(lenets) > 1:
        values = [row["accuracy"][-1] for row in lenets]
        apart = max(values) - min(values)
        checks.append(_check("lenet accuracy over k", apart, f"within {LENET_SPREAD}", apart <= LENET_SPREAD))
        losses = [row["train_loss"][0] for row in lenets]
        apart = max(losses) - min(losses)
        checks.append(
            _check(
                "lenet first epoch's loss over k",
                apart,
                f"within {FIRST_LOSS_SPREAD}",
                apart <= FIRST_LOSS_SPREAD,
            )
        )
    return checks


def _bits_checks(trained: dict[tuple[str, int], Row]) -> Iterable[Check]:
    counts = _counts(trained, "lenet-bits")
    if len(counts) > 1:
        found = {trained["lenet-bits", k]["weights_sha256"] for k in counts}
        value = f"{len(found)} over k={','.join(map(str, counts))}"
        yield _check("lenet-bits weights_sha256", value, "1", len(found) == 1)


def _proof_checks(proofs: dict[tuple[str, str, int], Row]) -> Iterable[Check]:
    for (model, precision, k), row in sorted(proofs.items()):
        ulps = [c["max_ulps"] for c in row.get("candidates", []) if c["max_ulps"] is not None]
        value = f"{row['verdict']}, at most {max(ulps):g} ulps" if ulps else row["verdict"]
        yield _check(
            f"proof of {model} {precision}, on 1 to {k}" if k > 1 else f"proof of {model} {precision}, on 1",
            value,
            "pass",
            row["verdict"] == "pass",
        )


def _end_checks(ends: dict[tuple[str, int], Row]) -> Iterable[Check]:
    """Failures of the yardstick are shown elsewhere: they are not kway's."""
    for (part, k), row in sorted(ends.items()):
        if not part.startswith("yardstick"):
            yield _check(f"{part}, k={k}", row["exit_code"], "exit code 0", row["exit_code"] == 0)


def _counts(found: dict[tuple[str, int], Row], name: str) -> list[int]:
    return sorted(k for part, k in found if part == name)


def _times(trained: dict[tuple[str, int], Row], others: dict[tuple[str, int], Row]) -> str:
    """Seconds an epoch, kway first, then what others take for the same work on the same machine."""
    counts = sorted({k for _, k in [*trained, *others]})
    lines = [["seconds an epoch", *(f"k={k}" for k in counts)]]
    for part in dict.fromkeys(part for part, _ in trained):
        cells = [trained.get((part, k)) for k in counts]
        lines.append([f"kway {part}", *(_seconds(row, "epoch_s", row and row["spread"]) for row in cells)])
    for what in dict.fromkeys(what for what, _ in others):
        if any("s_epoch" in others[key] for key in others if key[0] == what):
            lines.append([what, *(_seconds(others.get((what, k)), "s_epoch") for k in counts)])
    return columns(lines)


def _seconds(row: Row | None, key: str, spread: float | None = None) -> str:
    if row is None or row.get(key) is None:
        return "-"
    return f"{row[key]:.3f}" + (f" ({spread:.0%})" if spread is not None else "")


def _accuracies(trained: dict[tuple[str, int], Row]) -> str:
    lines = [["", "last accuracy", "first loss", "to first step", "peak memory, MiB"]]
    for (part, k), row in sorted(trained.items()):
        start = row.get("to_first_step_s")
        lines.append(
            [
                f"{part} k={k}",
                f"{row['accuracy'][-1]:.4f}",
                f"{row['train_loss'][0]:.5f}",
                "-" if start is None else f"{start:.1f} s",
                ", ".join(f"{size / 2**20:.0f}" for size in row["peak_memory_bytes"]),
            ]
        )
    return columns(lines)


def _verdicts(checks: list[Check]) -> str:
    lines = [
        [
            "pass" if check["passed"] else "FAIL",
            check["check"],
            f"{check['value']:.5g}" if isinstance(check["value"], float) else str(check["value"]),
            check["bar"],
        ]
        for check in checks
    ]
    return columns(lines) if lines else "nothing to judge"
