"""Which shares are timed: those that numbers of devices give, each with the threads that a rank then has."""

from collections.abc import Callable
from dataclasses import dataclass

# Up to so many devices each number has its own sitting; beyond, about half as many more each time.
EACH = 4


@dataclass(frozen=True)
class Seat:
    """One device of ``devices``, with ``threads`` of the host; ``shares``: samples that are timed there, largest first.

    The first is that of the job's batch, the others are there to tell the fixed part from that of each sample.
    """

    devices: int
    threads: int
    shares: tuple[int, ...]


def numbers(most: int) -> list[int]:
    """Return the numbers of devices that are timed, up to ``most``, which is one of them: 1, 2, 3, 4, 6, 8, 12, ..."""
    found = list(range(1, min(most, EACH) + 1))
    while found[-1] < most:
        # Between powers of two lies one that is half as much again.
        last = found[-1]
        found.append(min(most, last + (last // 2 if last & (last - 1) == 0 else last // 3)))
    return found


def seats(batch_size: int, most: int, threads: Callable[[int], int]) -> list[Seat]:
    """Return the seats for 1 to ``most`` devices. ``threads``: of a rank of so many devices.

    One device alone has two smaller shares besides, as many devices have one: two points make a line, the third one
    shows whether it is one. Where all numbers of devices have the same threads, their shares are each other's points.
    """
    counts = [count for count in numbers(most) if count <= batch_size]
    alike = len({threads(count) for count in counts[1:]}) == 1 and len(counts) > 2
    found = []
    for count in counts:
        own = -(-batch_size // count)
        parts = (1, 2, 4) if count == 1 else (1, 2) if not alike or count == counts[-1] else (1,)
        found.append(
            Seat(count, threads(count), tuple(dict.fromkeys(max(1, -(-own // part)) for part in parts)))
        )
    return found
