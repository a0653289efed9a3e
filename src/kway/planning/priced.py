"""Prices of candidates from a workload and measurements, by what each axis says that it costs."""

import math
from collections.abc import Mapping

from kway.measurements import Measurements
from kway.planning.beyond import beyond
from kway.planning.candidates import Candidate
from kway.planning.price import Price, Pricer
from kway.strategies.pricing import priced
from kway.workload import Workload


def pricer(
    workloads: Mapping[str, Workload], measurements: Mapping[str, Measurements], shards: int
) -> Pricer:
    """Return what prices candidates. ``workloads``, ``measurements``: by type of device; ``shards``: of level bits.

    The pricer raises ``NotMeasuredError`` where what it would need was not measured.
    """

    def price(candidate: Candidate, batch: int) -> Price:
        kind = candidate.device_type
        estimate = priced(
            candidate.layout,
            candidate.device_set,
            candidate.step_kind,
            workloads[kind],
            measurements.get(kind),
            threads=candidate.threads,
            batch_size=batch,
            shards=shards,
        )
        memory = {name: math.ceil(size) for name, size in estimate.memory.items() if size > 0}
        terms = {name: seconds for name, seconds in estimate.terms.items() if seconds > 0}
        notes = [*estimate.notes, *beyond(workloads[kind], candidate, estimate.samples)]
        return Price(terms, memory, tuple(notes), estimate.fixed)

    return price
