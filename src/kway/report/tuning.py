"""What tuning tried, as a table."""

from collections.abc import Mapping
from typing import Any

from kway.records import Tuning
from kway.report.tables import table
from kway.units import counted


def lines_of(record: Tuning) -> list[str]:
    """Return the table of what was tried, and what was chosen."""
    lines = []
    if record.rows:
        headings = ["what was tried", "ms a step", "ratio", "spread", "took", "verdict"]
        lines += [table(headings, [_cells(row) for row in record.rows]), ""]
    where = f"{record.strategy} on {counted(record.devices, 'device')}"
    lines.append(f"chosen     {choice_text(record.choice)} ({where}, {record.exactness})")
    if record.how == "remembered":
        lines.append(f"           as measured on {record.made}; --refresh measures again")
    elif record.how == "left":
        lines.append(f"           nothing was measured: {record.why}")
    elif record.plain_step_s and record.chosen_step_s:
        ratio = record.chosen_step_s / record.plain_step_s
        lines.append(f"           {ratio:.2f} of the step as it is; measured in {record.seconds:.0f} s")
        lines += [f"           {line}" for line in [_sureness(record)] if line]
    lines += [f"note       {text}" for text in record.notices]
    late = sum(row["verdict"].startswith("not tried") for row in record.rows)
    if late:
        lines.append(
            f"note       {counted(late, 'candidate')} not tried for want of time: --tune-seconds gives more"
        )
    return lines


def _sureness(record: Tuning) -> str:
    """Say whether a choice was measured a second time, and how far the times lay apart where it was not."""
    if not record.choice:
        return ""
    if record.again is not None:
        return f"{record.again:.2f} when both were measured once more"
    deciding = [
        row for row in record.rows if row["choice"] in ({}, record.choice) and row["step_s"] is not None
    ]
    spreads = " and ".join(f"{row['spread']:.0%}" for row in deciding)
    return f"measured once only, with spreads of {spreads}: --refresh and a larger --tune-seconds measure it twice"


def choice_text(choice: Mapping[str, Any]) -> str:
    """Say a choice in one line; what changes nothing is ``as it is``."""
    return ", ".join(_said(name, value) for name, value in choice.items()) or "as it is"


def _cells(row: Mapping[str, Any]) -> list[str | None]:
    timed = row["step_s"] is not None
    return [
        choice_text(row["choice"]),
        f"{row['step_s'] * 1e3:.3f}" if timed else None,
        f"{row['ratio']:.3f}" if timed else None,
        f"{row['spread']:.1%}" if timed else None,
        None if row["cost_s"] is None else f"{row['cost_s']:.1f} s",
        row["verdict"],
    ]


def _said(name: str, value: Any) -> str:
    what = name.replace("_", " ")
    if value is True:
        return what
    return f"no {what}" if value is False else f"{what} {value}"
