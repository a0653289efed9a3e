"""Every candidate priced, ranked, and explained; the rows of plan.json."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kway.errors import NotMeasuredError, UsageError
from kway.planned import CLOSE, not_told_apart, one_device
from kway.planning.candidates import Candidate, Left
from kway.planning.explain import explained
from kway.planning.fits_nowhere import fits_nowhere
from kway.planning.price import Price, Pricer, Room, Scaling
from kway.planning.scaling import amdahl_bound, break_even_batch, break_even_flop, serial_fraction
from kway.strategies.layout import one_process


@dataclass(frozen=True)
class Found:
    """Candidates ranked as rows of plan.json, which is ``chosen``, what could not be priced, and Amdahl's bound."""

    rows: list[dict[str, Any]]
    chosen: int
    left: list[Left]
    serial_fraction: float | None
    serial_error: float | None
    amdahl_bound: float | None
    candidates: list[Candidate] = field(default_factory=list)


def search(
    candidates: Iterable[Candidate],
    price: Pricer,
    room: Room,
    scaling: Scaling,
    cores: int,
    flop_per_sample: float | None,
    title: str,
    level: str,
    close: float = CLOSE,
    has_blocks: bool = True,
) -> Found:
    """Price and rank candidates. ``cores``: more CPU ranks are never chosen. ``title``: what errors call the model;
    ``level``: at which exactness they are priced. ``close``: by which part candidates may differ and not be told apart.
    ``has_blocks``: whether the model has blocks that could be computed again.

    Raises ``UsageError`` where nothing can be priced, ``NotMeasuredError`` where only figures are missing for that, and
    where nothing fits: with what is missing and what would help.
    """
    priced: list[tuple[Candidate, Price]] = []
    left: list[Left] = []
    refused = []
    for each in candidates:
        try:
            priced.append((each, price(each, scaling.of(each.devices))))
        except UsageError as error:
            left.append(Left(each.strategy, each.device_set, each.step_kind, str(error)))
            refused.append(error)
    if not priced:
        why = left[0].why if left else "there is no layout"
        unmeasured = refused and all(isinstance(error, NotMeasuredError) for error in refused)
        raise (NotMeasuredError if unmeasured else UsageError)(f"no plan for {title}", why)
    rows = [(each, _row(each, cost, room(each), scaling, cores)) for each, cost in priced]
    rows.sort(key=lambda pair: _rank(pair[1]))
    if not any(row["fits"] for _, row in rows):
        raise fits_nowhere(title, rows, price, room, scaling, level, has_blocks)
    table = [row for _, row in rows]
    chosen = _chosen(table, close)
    of = {id(row): each for each, row in rows}
    for each, row in rows:
        one = one_device(table, row)
        if one is not None and each.devices > 1:
            row["break_even"] = _break_even(each, of[id(one)], price, scaling, flop_per_sample)
    for row, reason in zip(table, explained(table, chosen, close), strict=True):
        row["reason"] = reason
    one = one_device(table, table[chosen])
    cost = None if one is None else price(of[id(one)], scaling.of(1))
    serial = None if cost is None else serial_fraction(cost)
    off = None if cost is None or cost.fixed is None else cost.fixed[1]
    # Amdahl's law is of one batch that is spread.
    bound = None if serial is None or scaling.weak else amdahl_bound(serial)
    if bound is not None and _best_speed_up(table, one) > bound:
        # Times of one device that hardly fall with its samples are of a noisy moment, or of other threads than several
        # devices have: no line goes through them.
        serial, off, bound = None, None, None
    return Found(table, chosen, left, serial, off, bound, [each for each, _ in rows])


def _row(candidate: Candidate, cost: Price, room: int | None, scaling: Scaling, cores: int) -> dict[str, Any]:
    batch = scaling.of(candidate.devices)
    missing = 0 if room is None else max(0, cost.memory_bytes - room)
    return {
        "strategy": candidate.strategy,
        "devices": candidate.devices,
        "device_set": list(candidate.device_set),
        "layout": dict(candidate.layout),
        "step_kind": candidate.step_kind,
        "batch_size": batch,
        "step_s": cost.step_s,
        "terms": dict(cost.terms),
        "memory_bytes": cost.memory_bytes,
        "memory": dict(cost.memory),
        "room_bytes": room,
        "fits": not missing,
        "missing_bytes": missing,
        "eligible": candidate.device_type != "cpu" or candidate.devices <= cores,
        "samples_per_s": batch / cost.step_s,
        "reason": "",
        "break_even": {"batch_size": None, "flop_per_sample": None, "known": False},
        "notes": list(cost.notes),
    }


def _best_speed_up(rows: Sequence[dict[str, Any]], one: dict[str, Any] | None) -> float:
    """Return the largest speed-up over this one device that is predicted."""
    over = [row for row in rows if row["fits"] and one_device(rows, row) is one]
    return max((row["samples_per_s"] / one["samples_per_s"] for row in over if one is not None), default=0.0)


def _rank(row: dict[str, Any]) -> tuple[bool, bool, float, int]:
    """Order: what fits, what may be chosen, the time of a sample; of equals the one with fewer devices."""
    return not row["fits"], not row["eligible"], -row["samples_per_s"], row["devices"]


def _chosen(rows: Sequence[dict[str, Any]], part: float) -> int:
    """Return which candidate is the plan: the fastest, or among those that are too close to tell from it one with fewer
    devices, and of these one whose ranks are processes: they share neither interpreter nor memory.
    """
    close = not_told_apart(rows, part)
    return min(close, key=lambda place: (rows[place]["devices"], one_process(rows[place]["layout"]), place))


def _break_even(
    many: Candidate, one: Candidate, price: Pricer, scaling: Scaling, flop: float | None
) -> dict[str, Any]:
    try:
        return {
            "batch_size": break_even_batch(many, one, price, scaling),
            "flop_per_sample": break_even_flop(many, one, price, scaling, flop),
            "known": True,
        }
    except UsageError:
        # What another batch would need was not measured.
        return {"batch_size": None, "flop_per_sample": None, "known": False}
