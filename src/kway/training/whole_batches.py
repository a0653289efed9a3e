"""The batches that trials step over: whole ones alone, for as long as they are asked for."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from kway.data.loader import Share


def whole_batches(order: Any) -> Iterator[tuple[int, int]]:
    """Name the whole batches by (epoch, step), in the order of ``whole_shares``."""
    whole = order.samples // order.batch_size
    return ((epoch, step) for epoch in count() for step in range(whole))


def whole_shares(loader: Any, batch_size: int) -> Iterator[Share]:
    """Pass on the shares of whole batches, epoch after epoch."""
    for epoch in count():
        for share in loader.epoch(epoch):
            if share.total == batch_size:
                yield share
