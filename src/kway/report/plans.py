"""A plan as text: the ranked table, what the time of each step is, the reasons, and how far to trust it."""

from typing import Any

from kway.planned import CLOSE, Planned, not_told_apart, one_device, short_set, spelled_set, titled
from kway.report.tables import table
from kway.units import bytes_text, counted, seconds_text

# Characters that a table of terms may be wide; what has no room stands in another one.
MOST_WIDE = 120
# A term that is a smaller part than this of every candidate's step has no column: a line names it.
SMALL = 0.01
# Of a prediction, the part by which it is off that asks for another look at what it rests on.
FAR_OFF = 0.2
# Lines on what was left out.
MOST_LEFT = 6
# Candidates that a line names.
MOST_NAMED = 4


def lines_of(record: Planned) -> list[str]:
    """Return tables, reasons and notes of a plan."""
    lines = [_ranked(record), "", *_terms(record.candidates)]
    lines += [
        f"{place + 1:>3}  {titled(row)}: {row['reason']}" for place, row in enumerate(record.candidates)
    ]
    lines += _notes(record.candidates)
    lines += _left(record.left)
    lines += ["", *_whole(record), *trust(record)]
    return [*lines, *(f"note       {text}" for text in record.notices)]


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each thing that prices leave out or go beyond, with the candidates whose prices do."""
    of: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        for text in row.get("notes", []):
            of.setdefault(text, []).append(str(place + 1))
    return [f"  !  {', '.join(places)}: {text}" for text, places in of.items()]


def _left(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for what could not be priced: a few, where it is much."""
    told = _candidates(rows)
    lines = [f"  -  {_name(row)}: left out: {row['why']}" for row in told[:MOST_LEFT]]
    more = len(told) - len(lines)
    return lines + (
        [f"  -  {counted(more, 'candidate')} more left out: see left in plan.json"] if more else []
    )


def left_out(rows: list[dict[str, Any]], most: int = MOST_LEFT) -> list[str]:
    """Return a line for each reason for which something was left out, ``most`` at most."""
    by_reason: dict[str, list[str]] = {}
    for row in _candidates(rows):
        by_reason.setdefault(row["why"], []).append(_name(row))
    lines = [
        f"left out: {names[0] if len(names) == 1 else counted(len(names), 'candidate')}: {why}"
        for why, names in by_reason.items()
    ]
    more = len(lines) - most
    return lines[:most] + ([f"left out for {counted(more, 'more reason')}"] if more > 0 else [])


def _candidates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, of what was left out, candidates and whole kinds of devices."""
    return [row for row in rows if row["devices"] or row["step_kind"] == "any"]


def _name(row: dict[str, Any]) -> str:
    if not row["devices"]:
        return "CPU ranks" if row["device_set"] == ["cpu"] else "GPUs"
    return f"{row['strategy']} on {short_set(row['device_set'])}, {row['step_kind']}"


def _ranked(record: Planned) -> str:
    rows = record.candidates
    checked = any(row.get("measured_step_s") for row in rows)
    headings = ["", "strategy", "devices", "step kind", "step", "samples/s", "speed-up", "memory each"]
    headings += ["measured", "error"] if checked else []
    cells = []
    for place, row in enumerate(rows):
        one = one_device(rows, row)
        cells.append(
            [
                f"{place + 1}{'*' if place == record.chosen else ''}",
                row["strategy"],
                spelled_set(row["device_set"]) if row["devices"] <= 4 else f"{row['devices']}",
                row["step_kind"],
                seconds_text(row["step_s"]),
                f"{row['samples_per_s']:,.0f}",
                None if one is None else f"{row['samples_per_s'] / one['samples_per_s']:.2f}",
                bytes_text(row["memory_bytes"]) + ("" if row["fits"] else " (too much)"),
            ]
        )
        if checked:
            measured, error = row.get("measured_step_s"), row.get("error")
            cells[-1] += [
                None if measured is None else seconds_text(measured),
                None if error is None else f"{error:+.1%}",
            ]
    return table(headings, cells)


def _terms(rows: list[dict[str, Any]]) -> list[str]:
    """Return what steps consist of, every term by its name, those that matter most first: tables one below the other,
    and a line on what is small in every step.
    """
    names = term_names(rows)
    small = [
        name for name in names if all(row["terms"].get(name, 0.0) < SMALL * row["step_s"] for row in rows)
    ]
    lines = []
    left = [name for name in names if name not in small]
    while left:
        count = next((n for n in range(len(left), 1, -1) if _width(_block(rows, left[:n])) <= MOST_WIDE), 1)
        lines += [_block(rows, left[:count]), ""]
        left = left[count:]
    if small:
        most = [(name, max(row["terms"].get(name, 0.0) for row in rows)) for name in small]
        texts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in most)
        lines += [f"small      each below {SMALL:.0%} of every step, at most: {texts}", ""]
    return lines


def _block(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Return the table of some terms, without candidates that have none of them."""
    cells = [
        [
            titled(row),
            *(seconds_text(row["terms"][name]) if row["terms"].get(name) else None for name in names),
        ]
        for row in rows
        if any(row["terms"].get(name) for name in names)
    ]
    return table(["", *names], cells)


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def term_names(rows: list[dict[str, Any]]) -> list[str]:
    """List the names of all terms that are not 0, largest sum over the candidates first."""
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row["terms"].items():
            sums[name] = sums.get(name, 0.0) + value / row["step_s"]
    return [name for name, value in sorted(sums.items(), key=lambda each: -each[1]) if value > 0]


def _whole(record: Planned) -> list[str]:
    """Say what was chosen, and what bounds any number of devices."""
    best = record.best
    lines = [f"chosen     {_chosen(record)}"]
    if record.serial_fraction is None and one_device(record.candidates, best) is not None:
        lines.append(f"serial     not known: {_no_line(record.candidates)}")
    if record.serial_fraction is not None:
        text = f"serial     {record.serial_fraction:.1%} of a step on one device stays whatever its samples"
        if record.serial_error:
            text += f" (by a line that is off by up to {record.serial_error:.1%} of its times)"
        bound = record.amdahl_bound
        lines.append(
            text + ("" if bound is None else f": more devices are at most {bound:.3g} times as fast (Amdahl)")
        )
    return lines


def _chosen(record: Planned) -> str:
    """Say how long a step of the chosen candidate takes: as was measured where it was, else as is predicted."""
    best, first = record.best, record.candidates[0]
    step_s, measured_s = best["step_s"], best.get("measured_step_s")
    if not measured_s:
        mark = " (doubtful: see the note)" if best.get("doubtful") else ""
        return f"{titled(best)}: {_step(best, step_s)}{mark}"
    more = ""
    if first["samples_per_s"] > best["samples_per_s"]:
        took_s = first.get("measured_step_s")
        unlike = first["batch_size"] != best["batch_size"]
        took = "was not measured"
        if took_s:
            took = f"took {_step(first, took_s) if unlike else seconds_text(took_s)}"
        more = f"; {titled(first)} was predicted to be faster and {took}"
    return f"{titled(best)}: {_step(best, measured_s)}, measured (predicted: {seconds_text(step_s)}{more})"


def _step(row: dict[str, Any], seconds: float) -> str:
    return f"{seconds_text(seconds)} a step of {counted(row['batch_size'], 'sample')}"


def _no_line(rows: list[dict[str, Any]]) -> str:
    """Say why no line goes through the times of one device: there are none of other shares, or they are too noisy."""
    if any(row["break_even"].get("known", True) for row in rows if row["devices"] > 1):
        return "the times of one device with fewer samples are too noisy to tell"
    return "one device was not timed with fewer samples"


def trust(record: Planned) -> list[str]:
    """Say how far the predictions can be trusted: by this check, and by all before."""
    lines = []
    if record.check is not None and record.check["mean_error"] is not None:
        check = record.check
        text = f"checked    off by {check['mean_error']:.1%} on average in {counted(check['candidates'], 'candidate')}"
        if check["pairs"]:
            pairs = counted(check["pairs"], "pair")
            text += f"; in the right order: {check['right_order']} of {pairs} a tenth apart or more"
        lines.append(text)
        if check["mean_error"] > FAR_OFF:
            lines += [f"           {text}" for text in _busier_moment(record)]
    lines += _too_close(record)
    history = record.history
    if history["checks"]:
        lines.append(
            f"history    off by {history['mean_error']:.0%} on average in {counted(history['checks'], 'check')} here"
        )
    elif not record.estimate_only:
        made = record.check is not None and record.check["mean_error"] is not None
        why = "nor is this one: see the notes" if made else "--check makes one"
        lines.append(f"history    no check is kept here yet ({why})")
    if record.estimate_only:
        lines.append("estimate   this machine is not here: nothing of it was measured")
    return lines


def _busier_moment(record: Planned) -> list[str]:
    """Say which moment may have been busy where a check is far off in one direction: where in both, no one moment is.

    Nothing of what the predictions rest on where that was found out just before.
    """
    errors = [row["error"] for row in record.candidates if row.get("error") is not None]
    too_slow, too_fast = max(errors, default=0.0) > FAR_OFF, min(errors, default=0.0) < -FAR_OFF
    if too_fast and not too_slow:
        return [
            "this check may be of a busier moment than what it rests on: check again while nothing else runs"
        ]
    basis = [*record.workloads, *record.measurements]
    if too_slow and not too_fast and not (basis and all(each.get("new") for each in basis)):
        return ["what it rests on may be of a busier moment than this: kway plan --refresh finds it out anew"]
    return []


def _too_close(record: Planned) -> list[str]:
    """Name the candidates that are too close to the fastest to be told from it, where that is because of what such
    predictions were off by.
    """
    known = record.too_close
    part, off = known["part"], known["mean_error"]
    if not known["checks"] or off <= CLOSE:
        return []
    near = [titled(record.candidates[place]) for place in not_told_apart(record.candidates, part)]
    if len(near) == 1:
        return []
    more = f" and {counted(len(near) - MOST_NAMED, 'candidate')} more" if len(near) > MOST_NAMED else ""
    checks = f"in {counted(known['checks'], 'check')} here"
    why = f"and by so much predictions of such candidates were off {checks}"
    if part < off:
        why = (
            f"predictions of such candidates were off by {100 * off:.3g}% {checks}, of which {100 * part:.3g}% count: "
            "all rest on the same times, and are off together"
        )
    return [
        f"too close  {'; '.join(near[:MOST_NAMED])}{more}: within {100 * part:.3g}% of the fastest, {why}"
    ]


def side_by_side(predicted_s: float, measured_s: float | None, chosen: str = "") -> str:
    """Say in a line what was predicted of a run, and what it took. ``chosen``: how its steps ran otherwise than as they
    are, of which alone there are predictions.
    """
    if measured_s is None:
        return f"predicted  {seconds_text(predicted_s)} a step; too few steps to time one"
    error = predicted_s / measured_s - 1
    text = f"predicted  {seconds_text(predicted_s)} a step, measured {seconds_text(measured_s)}: off by {error:+.1%}"
    return f"{text} (the prediction was made without {chosen})" if chosen else text
