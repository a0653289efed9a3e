"""Why a plan's predictions may be far off: what it rests on was timed beside other programs, or cannot be so."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kway.measurements import beside_others
from kway.planned import CLOSE, Planned, one_device, titled, type_of
from kway.workload import Workload

# What helps, where it was remembered and where it was handed in.
REFRESH = "kway plan --refresh, in Python refresh=True of kway.plan, finds it out anew"
PROFILE_ANEW, MEASURE_ANEW = "profile it anew: kway profile", "measure anew: kway measure --refresh"


class Moment(NamedTuple):
    """``what`` was found out, and when (``made``), while other programs kept ``others`` busy; ``anew``: what helps."""

    what: str
    made: str
    others: str
    anew: str


def of_profile(workload: Workload, given: bool) -> list[Moment]:
    """Return the moment where a model was profiled beside other programs. ``given``: the record was handed in."""
    if not workload.busy:
        return []
    anew = PROFILE_ANEW if given else REFRESH
    return [Moment(f"the profile on {workload.device} is", workload.made, workload.busy, anew)]


def of_measurements(entries: Iterable[Mapping[str, Any]], given: bool) -> list[Moment]:
    """Return each moment at which experiments were done beside other programs. ``entries``: of their record;
    ``given``: it was handed in.
    """
    anew = MEASURE_ANEW if given else REFRESH
    return [
        Moment(f"measurements ({', '.join(names)}) are", made, others, anew)
        for names, others, made in beside_others(entries)
    ]


def said(moments: Iterable[Moment]) -> list[str]:
    """Return one line on all of these moments; none where there are none."""
    every = list(dict.fromkeys(moments))
    if not every:
        return []
    whose = ["other programs", *["they"] * (len(every) - 1)]
    parts = [
        f"{each.what} of {each.made[:16].replace('T', ' ')} (UTC), when {who} kept {each.others} busy"
        for each, who in zip(every, whose, strict=True)
    ]
    anew = "; ".join(dict.fromkeys(each.anew for each in every))
    return [f"{'; '.join(parts)}: predictions may be far from what steps take without them ({anew})"]


def of_a_busy_moment(record: Planned) -> bool:
    """Whether some of what a plan rests on was timed beside other programs: what its predictions are off by then tells
    of these, and not of the model.
    """
    return any(each.get("busy") for each in [*record.workloads, *record.measurements])


def impossible(rows: Sequence[dict[str, Any]], given: Collection[str]) -> list[str]:
    """Return a line where k devices are predicted to be more than k times as fast as one of them, if any are.

    It names the candidate that is furthest beyond. ``rows``: all candidates, ranked. ``given``: the types of device
    whose profile was handed in.
    """
    beyond = []
    for row in rows:
        one = one_device(rows, row)
        if one is not None and row["devices"] > 1:
            times = row["samples_per_s"] / one["samples_per_s"]
            beyond.append((times / row["devices"], times, row))
    excess, times, row = max(beyond, key=lambda each: each[0], default=(0.0, 0.0, {}))
    # Smaller shares may fit a cache, and times have a spread.
    if excess <= 1 + CLOSE:
        return []
    anew = PROFILE_ANEW if type_of(row) in given else REFRESH
    return [
        f"{titled(row)} would be {times:.3g} times as fast as one device, which by what is known {row['devices']} "
        f"devices cannot be: the time of one device is probably of a busy moment ({anew})"
    ]
