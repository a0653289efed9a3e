"""Parts one after another within a time, for each number of devices, and again those that have not settled."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from parts import GRACE_S, Part, Row, run

TRIES = 3


def measure(
    wanted: Callable[[int], list[Part]],
    counts: Sequence[int],
    available: int,
    file: Path,
    seconds: float,
    again: Callable[[Part, int, list[Row]], Part | None] | None = None,
    data: Path | None = None,
) -> None:
    """Run the parts ``wanted`` for each of ``counts`` that there are devices for, and append their rows to ``file``.

    ``again`` returns what of a part must be measured again, from all its rows so far; that is done while the time,
    ``seconds`` in all, allows, and at most TRIES times. ``data``: see ``parts.run``.
    """
    deadline = time.monotonic() + seconds
    done: list[tuple[Part, int, list[Row]]] = []

    def take(part: Part, k: int) -> list[Row]:
        left = deadline - time.monotonic()
        if left < GRACE_S:
            print(f"k={k} {part.name} left out: no time", flush=True)
            return []
        return run(part, k, file, min(part.limit, left), data)

    for k in counts:
        if k > available:
            print(f"k={k} left out: {available} devices", flush=True)
            continue
        for part in wanted(k):
            print(f"k={k} {part.name} begins, {deadline - time.monotonic():.0f} s left", flush=True)
            done.append((part, k, take(part, k)))
    if again is None:
        return
    for number in range(1, TRIES):
        for part, k, rows in done:
            more = again(part, k, rows)
            # One that took too long for what is left would be cut short.
            if more is None or rows[-1].get("seconds", 0.0) > deadline - time.monotonic():
                continue
            print(f"k={k} {part.name} has not settled: try {number + 1}", flush=True)
            rows.extend(take(more, k))
