"""Why a plan's predictions may be far off: what it rests on was timed beside other programs, or cannot be so."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kway.cost.estimate import COMPUTE
from kway.measurements import beside_others
from kway.planned import CLOSE, Planned, one_device, titled, type_of
from kway.units import counted, seconds_text
from kway.workload import Workload

# By which part a share may be said to take longer to compute than all samples on one device: times have a spread, and
# the one device has the threads of all.
SURE = 0.1
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
    """Return a line where k devices are predicted to be more than k times as fast as one of them, if any are, and one
    where a device would compute its share for longer than one device all samples.

    Each names the candidate that is furthest beyond. ``rows``: all candidates, ranked. ``given``: the types of device
    whose profile was handed in.
    """
    return [*_too_fast(rows, given), *_too_slow(rows, given)]


def doubtful(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each row whose prediction cannot be; ``impossible`` names the ones that are furthest beyond."""
    fast = [row for excess, _, row in _speed_ups(rows) if excess > 1 + CLOSE]
    return fast + [each[-1] for each in _shares(rows) if each[0] > 1 + SURE]


def _shares(
    rows: Sequence[dict[str, Any]],
) -> list[tuple[float, float, float, int, int, dict[str, Any]]]:
    """Return of each candidate with several devices how many times as long as it may a device computes its share, both
    times in seconds (its own, and of one device), the samples of both, and its row.
    """
    found = []
    for row in rows:
        one = one_device(rows, row)
        if one is None or row["devices"] == 1 or one["step_kind"] != row["step_kind"]:
            continue
        alone, own = one["terms"].get(COMPUTE, 0.0), row["terms"].get(COMPUTE, 0.0)
        # CPU ranks share the threads of one device: where all shares together are more than its samples (a batch for
        # each device, or one that cannot be cut evenly), so much longer may each take.
        share = -(-row["batch_size"] // row["devices"])
        more = max(1.0, share * row["devices"] / one["batch_size"])
        found.append((own / (alone * more) if alone else 0.0, own, alone, share, one["batch_size"], row))
    return found


def _too_slow(rows: Sequence[dict[str, Any]], given: Collection[str]) -> list[str]:
    excess, own, alone, share, whole, row = max(
        _shares(rows), key=lambda each: each[0], default=(0.0, 0.0, 0.0, 0, 0, {})
    )
    if excess <= 1 + SURE:
        return []
    anew = PROFILE_ANEW if type_of(row) in given else REFRESH
    return [
        f"{titled(row)}: each would compute {counted(share, 'sample')} for {seconds_text(own)}, and one device "
        f"{counted(whole, 'sample')} for {seconds_text(alone)}, which cannot be: the times of one of {row['devices']} "
        f"devices are probably of a busy moment ({anew})"
    ]


def _speed_ups(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float, dict[str, Any]]]:
    """Return of each candidate with several devices by how much it is faster than as many times one device, how many
    times it is as fast as one, and its row.
    """
    found = []
    for row in rows:
        one = one_device(rows, row)
        if one is not None and row["devices"] > 1:
            times = row["samples_per_s"] / one["samples_per_s"]
            found.append((times / row["devices"], times, row))
    return found


def _too_fast(rows: Sequence[dict[str, Any]], given: Collection[str]) -> list[str]:
    excess, times, row = max(_speed_ups(rows), key=lambda each: each[0], default=(0.0, 0.0, {}))
    # Smaller shares may fit a cache, and times have a spread.
    if excess <= 1 + CLOSE:
        return []
    anew = PROFILE_ANEW if type_of(row) in given else REFRESH
    return [
        f"{titled(row)} would be {times:.3g} times as fast as one device, which by what is known {row['devices']} "
        f"devices cannot be: the time of one device is probably of a busy moment ({anew})"
    ]
