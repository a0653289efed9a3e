"""Where a loop of the user's own can run: once in each process, in ranks that are there, or alone."""

import sys
from pathlib import Path
from typing import Any

from kway.data.share import Share
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


def check_share(share: Any, pieces: int) -> None:
    """Raise ``UsageError`` for what is no share of ``batches``, or one that lacks samples, or ``pieces`` of them.

    A loop may put other tensors in their place.
    """
    if not isinstance(share, Share):
        raise UsageError(
            f"step() of a {type(share).__name__}",
            "it takes a share, which is what batches(epoch) gives: how samples are cut is kway's to know",
            "write: for share in p.batches(epoch): loss = p.step(share)",
        )
    held = sum(samples for _, samples in share.micro)
    if len(share.micro) < pieces or held != share.count:
        raise UsageError(
            f"step() of a share whose micro-batches (micro) are {len(share.micro)} with {held} samples, and not "
            f"those {share.count} samples that it was cut with",
            "all samples of a batch count in its step",
            "change the tensors of a micro-batch, and leave the list and its numbers as they are",
        )
