"""Where a loop of the user's own can run: once in each process, in ranks that are there, or alone."""

import sys
from pathlib import Path
from typing import Any

from kway.devices.select import spelled
from kway.errors import UsageError
from kway.jobs.place import Place


def check_own_loop(where: Place, devices: Any) -> None:
    """Raise ``UsageError`` for a place whose ranks are threads, or would have to be started. ``devices``: as asked."""
    if where.in_threads:
        raise UsageError(
            f"kway.parallel with strategy {where.plan.strategy}",
            "a loop of your own runs in one thread of a process",
            "use strategy data with kway launch, or kway.train",
        )
    if where.starts_ranks:
        raise UsageError(
            f"kway.parallel on {where.plan.devices} devices in a process that is alone",
            "a loop of your own runs once on each rank",
            f"start it with: kway launch --devices {spelled(devices)} {Path(sys.argv[0]).name or 'script.py'}",
        )
