"""Whether all ranks read the same: checked before a step whose collectives would not meet otherwise."""

from collections.abc import Callable

from kway.errors import DataError

# Hands in one number and returns that of every rank, in rank order. A collective.
Compare = Callable[[int], list[int]]


def alone(number: int) -> list[int]:
    """Compare with nobody: what a process without other ranks does."""
    return [number]


def check(compare: Compare, number: int, got: str, need: str, do: str) -> None:
    """Compare a number over the ranks. Raises ``DataError``, on all of them, where one differs from rank 0.

    ``got`` has a place for ``{rank}``, the first that differs.
    """
    numbers = compare(number)
    stray = next((rank for rank, other in enumerate(numbers) if other != numbers[0]), None)
    if stray is not None:
        raise DataError(got.format(rank=f"rank {stray}"), need, do)


def check_order(compare: Compare, digest: int, name: str, epoch: int) -> None:
    """Check that the sampler ``name`` gives every rank the same order in ``epoch`` (from 0)."""
    check(
        compare,
        digest,
        f"in epoch {epoch + 1}, {name} gives {{rank}} another order than rank 0",
        "every rank replays the sampler and must see the same",
        "let it draw from the global generators of torch, numpy or Python, from a torch.Generator that it calls "
        "generator, or from one that it seeds by set_epoch; not from the system, the time or the rank",
    )


def check_stream(compare: Compare, digest: int, name: str, epoch: int, step: int) -> None:
    """Check that the stream ``name`` gives every rank the same items, or its end, at ``step`` of ``epoch``."""
    check(
        compare,
        digest,
        f"in epoch {epoch + 1}, step {step + 1}, {name} gives {{rank}} other items than rank 0",
        "every rank reads the whole stream and must see the same",
        "do not split it by rank or worker: kway does; let it draw from the global generators of torch, numpy or "
        "Python, or from one that it seeds itself",
    )
