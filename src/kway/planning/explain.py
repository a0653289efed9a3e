"""Why one candidate is the fastest, and for each that loses one sentence with its numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from kway.planned import CLOSE, one_device, titled
from kway.units import bytes_text, counted, seconds_text

# Of the largest change of a term in its direction, and of the step, what is left unsaid.
SMALL, SMALL_OF_STEP = 0.05, 0.001
# By which part two candidates differ that are said to be as fast as each other.
EVEN = 0.005

Row = dict[str, Any]


def explained(rows: Sequence[Row], chosen: int, close: float = CLOSE) -> list[str]:
    """Return the sentence of each row. ``chosen``: which one is the plan; ``close``: what is not told apart."""
    return [_reason(row, place, rows, chosen, close) for place, row in enumerate(rows)]


def _reason(row: Row, place: int, rows: Sequence[Row], chosen: int, close: float) -> str:
    if not row["fits"]:
        return does_not_fit(row)
    one = one_device(rows, row)
    if place == chosen:
        return _why_first(row, one, rows, chosen, close)
    if not row["eligible"]:
        return f"never chosen: {counted(row['devices'], 'rank')} share fewer cores"
    best = rows[chosen]
    if one is not None and one is not row and row["samples_per_s"] < one["samples_per_s"] * (1 - EVEN):
        text = f"{_slower(row, one)}: {_changes(one, row)}"
        after = _from_batch_on(row, row["batch_size"] != one["batch_size"])
        return f"{text}; {after}" if after else text
    if row["samples_per_s"] > best["samples_per_s"]:
        ratio = several_ratio(row, best)
        return (
            f"predicted to be {ratio:.2f} times as fast as {titled(best)}, too close to tell where predictions may "
            f"be off by {_part(close)}: {_changes(best, row)}"
        )
    return f"{_slower(row, best)}: {_changes(best, row)}"


def _part(close: float) -> str:
    return f"{100 * close:.3g}%"


def _why_first(row: Row, one: Row | None, rows: Sequence[Row], chosen: int, close: float) -> str:
    word = "fastest" if chosen == 0 else f"chosen of those within {_part(close)} of the fastest"
    if row["devices"] > 1 and one is not None:
        ratio = row["samples_per_s"] / one["samples_per_s"]
        return f"{word}: {ratio:.2f} times as fast as {titled(one)}: {_changes(one, row)}"
    others = [other for other in rows if other["fits"] and other["eligible"] and other is not row]
    several = next((other for other in others if other["devices"] > row["devices"]), None)
    if several is not None:
        return f"{word}: {titled(several)} takes {several_ratio(row, several):.2f} times as long a sample"
    if others:
        return f"{word} of {counted(len(others) + 1, 'candidate')}"
    crowded = sum(other["fits"] and not other["eligible"] for other in rows if other is not row)
    if crowded and row["eligible"]:
        return "the only candidate that fits and has no more ranks than cores"
    if crowded:
        return f"{word} of {counted(crowded + 1, 'candidate')}, all with more ranks than cores"
    return "the only candidate that fits" if len(rows) > 1 else "the only candidate"


def several_ratio(row: Row, other: Row) -> float:
    """Return how many times as long as ``row`` the other candidate takes for a sample."""
    return float(row["samples_per_s"] / other["samples_per_s"])


def _slower(row: Row, other: Row) -> str:
    ratio = several_ratio(other, row)
    if ratio < 1 + EVEN:
        return f"as fast as {titled(other)}"
    return f"{ratio:.2f} times slower than {titled(other)}"


def _changes(before: Row, after: Row) -> str:
    """Say which terms of a step fall, and which add to it; of steps of unlike batches, which they are of."""
    falls, adds = changes(before["terms"], after["terms"])
    parts = []
    if falls:
        parts.append(
            f"{_names(falls)} {'falls' if len(falls) == 1 else 'fall'} by {seconds_text(-sum(falls.values()))}"
        )
    if adds:
        parts.append(
            f"{_names(adds)} {'adds' if len(adds) == 1 else 'add'} {seconds_text(sum(adds.values()))}"
        )
    text = ", ".join(parts) or "no term differs"
    if before["batch_size"] != after["batch_size"]:
        text += f" (a step of {after['batch_size']:,} samples against one of {before['batch_size']:,})"
    return text


def changes(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return by how many seconds terms fall (below 0) and grow, largest first, without those that hardly change."""
    names = dict.fromkeys([*before, *after])
    differ = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
    least = SMALL_OF_STEP * sum(before.values())
    falls = _largest({name: value for name, value in differ.items() if value < -least})
    return falls, _largest({name: value for name, value in differ.items() if value > least})


def _largest(changed: Mapping[str, float]) -> dict[str, float]:
    least = SMALL * max(map(abs, changed.values()), default=0.0)
    ordered = sorted(changed.items(), key=lambda each: -abs(each[1]))
    return {name: value for name, value in ordered if abs(value) > least}


def _names(terms: Mapping[str, float]) -> str:
    names = list(terms)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _from_batch_on(row: Row, each: bool) -> str:
    """Say from where on more devices win, or that they never do. ``each``: whether the batch is one for each device."""
    if not row["break_even"].get("known", True):
        return f"from which batch on {row['devices']} win is not known"
    batch, flop = row["break_even"]["batch_size"], row["break_even"]["flop_per_sample"]
    if batch is not None:
        size = f"{_rounded(batch):,} a device" if each else f"{_rounded(batch):,}"
        return f"from batch {size} on, {row['devices']} win"
    if flop is not None:
        return f"with {flop:.3g} flop a sample, {row['devices']} would win"
    return f"no batch makes {row['devices']} win"


def _rounded(batch: int) -> int:
    """Return a batch in two digits that tell something: more would promise what no model of costs holds."""
    size = int(10 ** max(0, len(str(batch)) - 2))
    return -(-batch // size) * size


def does_not_fit(row: Row) -> str:
    """Say how much is missing on a device, and what needs most."""
    largest = sorted(row["memory"].items(), key=lambda part: -part[1])[:2]
    most = " and ".join(f"{name} {bytes_text(size)}" for name, size in largest)
    return (
        f"does not fit: it needs {bytes_text(row['memory_bytes'])} on each device ({most}), "
        f"{bytes_text(row['missing_bytes'])} more than there is"
    )
