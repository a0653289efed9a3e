"""What a layout costs: a step of one device's share, and what each axis adds to it, in their order."""

from collections.abc import Mapping, Sequence
from math import prod

from kway.cost.estimate import Estimate
from kway.measurements import Measurements
from kway.strategies.layout import axes
from kway.strategies.levels import DEFAULT_SHARDS
from kway.workload import Workload


def priced(
    layout: Mapping[str, int],
    devices: Sequence[str],
    step_kind: str,
    workload: Workload,
    measurements: Measurements | None,
    *,
    threads: int,
    batch_size: int | None = None,
    shards: int = DEFAULT_SHARDS,
) -> Estimate:
    """Return the estimate of a step over ``batch_size`` samples (the workload's) on ``layout`` over ``devices``.

    ``devices``: one for each rank, as torch spells them; ``threads``: of the CPU, of each. The slowest device decides:
    that is one with the largest share, of ceil(batch_size / shares) samples. Raises ``NotMeasuredError`` where what it
    would need was not measured.
    """
    known = axes()
    batch = workload.batch_size if batch_size is None else batch_size
    shares = prod(size for axis, size in layout.items() if known[axis].splits_batch)
    estimate = Estimate(
        workload, measurements, tuple(devices), step_kind, batch, -(-batch // shares), threads, shards
    )
    estimate.begin()
    for axis in sorted(layout, key=lambda name: known[name].order):
        known[axis].price(estimate, layout[axis], estimate.devices)
    return estimate
