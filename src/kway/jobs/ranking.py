"""What is asked for, priced from what is known and ranked: the record of a plan, before any run."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from kway.errors import UsageError
from kway.jobs.asked import Asked
from kway.jobs.known_costs import Known, used
from kway.measurements import beside_others
from kway.planned import Planned
from kway.planning import doubts, history
from kway.planning.candidates import Candidate
from kway.planning.price import Room
from kway.planning.priced import pricer
from kway.planning.search import Found, search
from kway.records import Cluster
from kway.training.surroundings import machine, versions


def ranked(asked: Asked, known: Known, begun: float, estimate_only: bool = False) -> Planned:
    """Return the record of what is asked for, from what is known. Raises ``UsageError`` where nothing fits.

    ``estimate_only``: for a machine that is not here, of which no check was ever made.
    """
    found, left = asked.candidates(lambda device: known.step_kinds(device, asked.step_kinds))
    if not found:
        raise _nothing(asked, [*(each.to_dict() for each in left), *known.kinds_left(asked.step_kinds)])
    checks = [] if estimate_only else history.recall(history.facts_of(asked.cluster))
    too_close = history.too_close(checks, found, asked.job.title)
    order = _searched(asked, known, found, too_close["part"])
    doubtful = {id(row) for row in doubts.doubtful(order.rows)}
    for row in order.rows:
        row["doubtful"] = id(row) in doubtful
    now = datetime.now(UTC)
    # In the form of the dates in records, which are in the order of their texts.
    since = (now - timedelta(seconds=time.perf_counter() - begun)).isoformat(timespec="seconds")
    return Planned(
        model=asked.job.title,
        precision=asked.job.precision,
        level=asked.level,
        shards=asked.shards,
        scaling=asked.scaling.name,
        batch_size=asked.scaling.batch,
        candidates=order.rows,
        chosen=order.chosen,
        left=[each.to_dict() for each in [*left, *order.left]] + known.kinds_left(asked.step_kinds),
        serial_fraction=order.serial_fraction,
        serial_error=order.serial_error,
        amdahl_bound=order.amdahl_bound,
        history=history.summary(checks),
        too_close=too_close,
        workloads=[
            {
                "device": each.device,
                "device_name": each.device_name,
                "made": each.made,
                "new": each.made >= since,
                "busy": each.busy,
            }
            for each in known.workloads.values()
        ],
        measurements=[
            {
                "device": kind,
                "made": each.made,
                "age_s": each.age_s,
                "new": each.made >= since,
                "busy": "; ".join(others for _, others, _ in beside_others(used(kind, each))),
            }
            for kind, each in known.measurements.items()
        ],
        machine=_machine(asked, estimate_only),
        versions=versions(),
        made=now.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - begun,
        notices=[
            *asked.notices,
            *known.notices,
            *doubts.impossible(order.rows, known.given),
        ],
        estimate_only=estimate_only,
        identity=dict(asked.identity),
    )


def _nothing(asked: Asked, left: Sequence[dict[str, Any]]) -> UsageError:
    why = dict.fromkeys(f"{row['step_kind']} ({', '.join(row['device_set'])}): {row['why']}" for row in left)
    return UsageError(f"no plan for {asked.job.title}", "; ".join(why) or "there is no layout")


def _machine(asked: Asked, estimate_only: bool) -> dict[str, Any]:
    """Return what the record says of the machine."""
    gpus = sorted({gpu["name"] for gpu in asked.cluster.gpus}) if "cuda" in asked.device_types else []
    if estimate_only:
        return {"cpu": asked.cluster.cpu["model"], "usable": asked.cluster.cpu["usable"], "gpus": gpus}
    return machine(gpus)


def _searched(asked: Asked, known: Known, found: Sequence[Candidate], close: float) -> Found:
    flops = [each.flop_per_sample for each in known.workloads.values()]
    return search(
        found,
        pricer(known.workloads, known.measurements, asked.shards),
        room_of(asked.cluster),
        asked.scaling,
        int(asked.cluster.cpu["usable"]),
        next((flop for flop in flops if flop is not None), None),
        asked.job.title,
        asked.level,
        close,
        any(
            each.memory["checkpointed_activation_bytes_per_sample"] is not None
            for each in known.workloads.values()
        ),
    )


def room_of(cluster: Cluster) -> Room:
    """Return what says how many bytes each device of a candidate has: what is free now, CPU ranks share it."""
    free = {f"cuda:{gpu['index']}": gpu["memory_free"] for gpu in cluster.gpus}

    def room(candidate: Candidate) -> int | None:
        if candidate.device_type == "cpu":
            return int(cluster.cpu["memory_available"]) // candidate.devices
        sizes = [free.get(device) for device in candidate.device_set]
        known = [size for size in sizes if size is not None]
        return min(known) if len(known) == len(sizes) else None

    return room
