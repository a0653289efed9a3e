"""What follows from prices of one model at several batches: serial part, Amdahl's bound, where more devices pay."""

from collections.abc import Callable

from kway.planning.candidates import Candidate
from kway.planning.price import Price, Pricer, Scaling

# No batch is larger.
MOST_SAMPLES = 1 << 30


def serial_fraction(cost: Price) -> float | None:
    """Return which part of a step on one device does not get shorter with the samples, 0 to 1; ``None``: not known.

    The fixed part of its terms, launch and what is fixed of input and optimizer, over the step: the part that stays
    where every sample is spread. Of the same line as these terms, so that the table and the bound say one thing.
    """
    return None if cost.fixed is None else min(1.0, max(0.0, cost.fixed[0] / cost.step_s))


def amdahl_bound(serial: float) -> float | None:
    """Return the largest speed-up over one device that a serial fraction allows, ``None`` for none.

    G. M. Amdahl, AFIPS 1967: with a part s that is not spread, k devices are at most 1 / (s + (1 - s) / k) times as
    fast, which is below 1 / s for any k.
    """
    return 1 / serial if serial > 0 else None


def break_even_batch(many: Candidate, one: Candidate, price: Pricer, scaling: Scaling) -> int | None:
    """Return the smallest batch from which ``many`` takes less time a sample than ``one``; ``None``: none found.

    It is that of all devices, or of each where the batch is (weak scaling). Looked for from above: from the
    returned batch up to 64 times the own one ``many`` wins at each that was tried. Prices beyond the shares that were
    measured are those of a line.
    """

    def wins(batch: int) -> bool:
        return faster(many, one, price, scaling, batch)

    least = 1 if scaling.weak else many.devices
    high = max(64 * scaling.batch, least)
    while high <= MOST_SAMPLES and not wins(high):
        high *= 8
    if high > MOST_SAMPLES:
        return None
    tried = _ladder(least, high)
    # The last one that loses, on a ladder of steps of a quarter, and then halving between it and the next.
    low = next((batch for batch in reversed(tried) if not wins(batch)), None)
    if low is None:
        return least
    high = next(batch for batch in tried if batch > low)
    return _first(low, high, wins)


def _ladder(low: int, high: int) -> list[int]:
    steps = [high]
    while steps[-1] > low:
        steps.append(max(low, min(steps[-1] - 1, int(steps[-1] / 1.25))))
    return steps[::-1]


def _first(low: int, high: int, wins: Callable[[int], bool]) -> int:
    """Return the first batch that wins, where ``low`` loses and ``high`` wins."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def faster(many: Candidate, one: Candidate, price: Pricer, scaling: Scaling, batch: int) -> bool:
    """Whether ``many`` takes less time a sample than ``one`` at a batch."""
    whole, own = scaling.of(many.devices, batch), scaling.of(one.devices, batch)
    return price(many, whole).step_s / whole < price(one, own).step_s / own


def break_even_flop(
    many: Candidate, one: Candidate, price: Pricer, scaling: Scaling, flop: float | None
) -> float | None:
    """Return how many operations a sample would have to take for ``many`` to be as fast as ``one`` at this batch.

    With T(B) = F + P, where P is the part that grows with the samples (T(2B) - T(B)), a model of c times as many
    operations a sample takes F + cP: what is fixed, and what collectives cost, stay. Equal times a sample at
    c = (F_k / n_k - F_1 / n_1) / (P_1 / n_1 - P_k / n_k), with n the samples of a step. ``None`` where operations
    were not counted, or no c does.
    """
    if flop is None:
        return None
    fixed, growing = [], []
    for each in (many, one):
        batch = scaling.of(each.devices)
        whole = price(each, batch).step_s
        more = price(each, 2 * batch).step_s - whole
        fixed.append((whole - more) / batch)
        growing.append(more / batch)
    gain = growing[1] - growing[0]
    return None if gain <= 0 else max(0.0, flop * (fixed[0] - fixed[1]) / gain)
