"""A model that fits on none of the candidates: one error that says how much is missing, and what would help."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kway.errors import NotMeasuredError, UsageError
from kway.planned import titled
from kway.planning.candidates import Candidate
from kway.planning.price import Pricer, Room, Scaling
from kway.units import bytes_text, counted

# What of a device's memory shrinks with the samples it holds at once, by the names that prices give it.
BY_SAMPLES = ("activations",)


def fits_nowhere(
    title: str,
    rows: Sequence[tuple[Candidate, dict[str, Any]]],
    price: Pricer,
    room: Room,
    scaling: Scaling,
    level: str,
    has_blocks: bool,
) -> UsageError:
    """Return the error. ``rows``: all that were priced at this level, none of which fits; ``has_blocks``: see
    ``kway.planning.search.search``.
    """
    candidate, row = min(rows, key=lambda pair: pair[1]["missing_bytes"])
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in _largest(row["memory"]))
    near = (
        f"the closest, {titled(row)}, needs {bytes_text(row['memory_bytes'])} on each device ({parts}) and has "
        f"{bytes_text(row['room_bytes'])}: {bytes_text(row['missing_bytes'])} are missing"
    )
    samples = counted(row["batch_size"], "sample")
    return UsageError(
        f"{title} with a batch of {samples} fits on none of {counted(len(rows), 'candidate')}",
        near,
        _help(candidate, row, price, room, scaling, level, has_blocks),
    )


def _largest(memory: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in memory.items() if size), key=lambda part: -part[1])[:4]


def _help(
    candidate: Candidate,
    row: dict[str, Any],
    price: Pricer,
    room: Room,
    scaling: Scaling,
    level: str,
    has_blocks: bool,
) -> str:
    """Say what would help: a smaller batch where one fits, else what takes less than the whole model."""
    has = room(candidate)
    assert has is not None  # what does not fit has a limit

    def memory(batch: int) -> Mapping[str, int]:
        try:
            return price(candidate, scaling.of(candidate.devices, batch)).memory
        except NotMeasuredError:
            # Of what smaller batches take nothing is known: that it is no less is no promise.
            return cast(Mapping[str, int], row["memory"])

    def fits(batch: int) -> bool:
        return sum(memory(batch).values()) <= has

    most = largest(fits, scaling.batch - 1)
    if most:
        flag = "--batch-size-per-device" if scaling.weak else "--batch-size"
        share = -(-scaling.of(candidate.devices, most) // candidate.devices)
        again = "; kway train --settings recompute=true keeps fewer activations of its blocks"
        return f"what would help: {flag} {most}{_in_parts(share, level)}{again if has_blocks else ''}"
    # Of the smallest batch: what shrinks with the samples may hide what does not.
    least = memory(1)
    fixed = sum(size for name, size in least.items() if not name.startswith(BY_SAMPLES))
    return (
        f"a smaller batch does not help, as {bytes_text(fixed)} do not depend on it: what would help is an optimizer "
        "that keeps less state (--optimizer sgd), a smaller model, or devices with more memory"
    )


def _in_parts(samples: int, level: str) -> str:
    """Name the same batch in parts of so many samples, where the level may allow that."""
    if level == "bits":
        # Its shards are the parts, and no share is cut further.
        return ""
    but = " (not of a model with batch normalisation)" if level == "math" else ""
    return f", or the same batch in parts, --micro-batch {samples}{but}"


def largest(holds: Callable[[int], bool], high: int) -> int:
    """Return the largest whole number up to ``high`` for which ``holds`` is true, 0 for none; true ones come first."""
    low = 0
    if high >= 1 and holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
