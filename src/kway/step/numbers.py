"""The numbers that travel with the gradients of a share, and what a step makes of their sums.

Functions of tensors and constants alone, so that a compiled step runs each of them as one kernel.

On the way they are one vector of 4 * ranks + 1: four rows with a place for each rank, which no other rank writes, so
that sums are exact: sums of losses, sums of weights, fingerprints of collectives, wishes. The last number is the
reducer's own: 0, or NaN where the sums must not count.
"""

import torch

Tensor = torch.Tensor


def alone(sums: Tensor, place: int = 0, ranks: int = 1) -> Tensor:
    """Return the vector of the rank at ``place`` with its sums (loss and weight, shape (2,)), and nothing told."""
    numbers = sums.new_zeros(4 * ranks + 1)
    numbers[:-1].view(4, ranks)[:2, place].copy_(sums)
    return numbers


def written(sums: Tensor, told: Tensor, place: int, ranks: int) -> Tensor:
    """Return the vector of the rank at ``place``. ``told``: fingerprint and wish, shape (2,)."""
    numbers = sums.new_zeros(4 * ranks + 1)
    numbers[:-1].view(4, ranks)[:, place].copy_(torch.cat([sums, told.to(sums.dtype)]))
    return numbers


def told(
    parts: Tensor, ranks: int, total: Tensor, averaged: bool, tells: bool, compares: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what the ranks' vectors say together (see ``apart``), in ``dtype``, and what gradients are divided by.

    ``parts``: what adds up to their sum, in float64, shape (parts, 4 * ranks + 1). ``total``: samples of the global
    batch, shape (1,), in ``dtype``, by which gradients are scaled already; ``averaged``: whether they are divided by
    weights. ``tells``: whether
    fingerprints travelled; ``compares``: whether a step whose fingerprints differ becomes NaN.
    """
    summed = parts.sum(0, dtype=torch.float64).to(dtype)
    slots = summed[:-1].view(4, ranks)
    loss, weight = slots[:2].sum(1).unbind()
    weight = weight + summed[-1]
    if compares:
        weight = weight + unlike(slots[2])
    total = total.view(())
    if averaged:
        # Gradients of a weight of 0 stay the 0 they are; of such a batch there is no loss, as on one device.
        divisor, loss = (weight / total).masked_fill(weight == 0, 1.0), loss / weight
    else:
        # Of the weight only that it is no number counts here, where ranks are mispaired.
        divisor, loss = weight * 0 + 1.0 / total, loss + weight * 0
    rows = [slots[0], slots[3], *([slots[2]] if tells else [])]
    return torch.cat([loss.view(1), weight.view(1), *rows]), divisor


def unlike(numbers: Tensor) -> Tensor:
    """Return 0 where all ``numbers`` are equal, else NaN: lowest less highest is 0, or negative, without a root."""
    low, high = torch.aminmax(numbers)
    return torch.sqrt(low - high)


def apart(numbers: Tensor, ranks: int, tells: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Take apart what ``told`` returns: loss, weight, each rank's sum of losses, wishes and fingerprints."""
    loss, weight, *rows = torch.split(numbers, [1, 1, *[ranks] * (3 if tells else 2)])
    return loss.view(()), weight.view(()), rows[0], rows[1], rows[2] if tells else None
