"""The numbers that travel with the gradients of a share, and what a step makes of their sums.

Functions of tensors and constants alone, so that a compiled step runs each of them as one kernel.

On the way they are one vector: ``ROWS`` with a place for each rank (or shard), which no other writes, so that sums are
exact: sums of losses, sums of weights, fingerprints of collectives, wishes. After them comes what is of all: the last
number is the reducer's own, 0, or NaN where the sums must not count.
"""

import torch

from kway.step.outcome import joined

Tensor = torch.Tensor

ROWS = 4
LOSSES, WEIGHTS, CALLS, WISHES = range(ROWS)


def length(places: int, beside: int = 1) -> int:
    """Return the length of the vector of so many places, with so many numbers after the rows."""
    return ROWS * places + beside


def rows(numbers: Tensor, places: int) -> Tensor:
    """Return the rows of such a vector: a view, shape (ROWS, places)."""
    return numbers[: ROWS * places].view(ROWS, places)


def alone(sums: Tensor, place: int = 0, ranks: int = 1) -> Tensor:
    """Return the vector of the rank at ``place`` with its sums (loss and weight, shape (2,)), and nothing told."""
    numbers = sums.new_zeros(length(ranks))
    rows(numbers, ranks)[:CALLS, place].copy_(sums)
    return numbers


def written(sums: Tensor, told: Tensor, place: int, ranks: int) -> Tensor:
    """Return the vector of the rank at ``place``. ``told``: fingerprint and wish, shape (2,)."""
    numbers = sums.new_zeros(length(ranks))
    rows(numbers, ranks)[:, place].copy_(torch.cat([sums, told.to(sums.dtype)]))
    return numbers


def told(
    parts: Tensor,
    ranks: int,
    nominal: Tensor,
    averaged: bool,
    tells: bool,
    compares: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return what the ranks' vectors say together, in ``dtype``, and what gradients are divided by.

    The former as ``outcome.apart`` takes it apart: the batch's loss and weight, sums of losses, wishes, fingerprints.

    ``parts``: what adds up to their sum, in float64, shape (parts, ``length(ranks)``). ``nominal``: what
    gradients are divided by already, shape (1,), in ``dtype``; ``averaged``: whether they are divided by
    weights. ``tells``: whether fingerprints travelled; ``compares``: whether a step whose fingerprints differ becomes
    NaN.
    """
    summed = parts.sum(0, dtype=torch.float64).to(dtype)
    slots = rows(summed, ranks)
    loss, weight = slots[:CALLS].sum(1).unbind()
    weight = weight + summed[-1]
    if compares:
        weight = weight + unlike(slots[CALLS])
    nominal = nominal.view(())
    if averaged:
        # Gradients of a weight of 0 stay the 0 they are; of such a batch there is no loss, as on one device.
        divisor, loss = (weight / nominal).masked_fill(weight == 0, 1.0), loss / weight
    else:
        # Of the weight only that it is no number counts here, where ranks are mispaired.
        divisor, loss = weight * 0 + 1.0 / nominal, loss + weight * 0
    calls = slots[CALLS] if tells else None
    return joined(loss, weight, slots[LOSSES], slots[WISHES], calls), divisor


def unlike(numbers: Tensor) -> Tensor:
    """Return 0 where all ``numbers`` are equal, else NaN: lowest less highest is 0, or negative, without a root."""
    low, high = torch.aminmax(numbers)
    return torch.sqrt(low - high)
