"""What the layers that look at the global batch must know of the share that is being computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kway.data.share import Share
from kway.errors import RefusedError
from kway.step.accompany import Meeting
from kway.step.arithmetic import Arithmetic


class Presence:
    """Whether this rank's current share counts: a rank without samples runs a ghost that must not count.

    The share holds ``samples`` of the ``total`` of the global batch, computed in ``pieces`` one after the other.
    """

    def __init__(self) -> None:
        self.counts = True
        self.samples = self.total = self.pieces = 1
        # Whether a batch must not be cut in time, because a layer needs its statistics as a whole.
        self.whole = False
        self.meeting = Meeting()
        self.arithmetic = Arithmetic()
        # Whether what is computed is the same on all ranks, and not a part of anything.
        self.apart = False
        # Called with each share that is taken up: from then on it is this job that computes.
        self.begins: list[Callable[[], None]] = []

    @contextmanager
    def alike(self) -> Iterator[None]:
        """While open, the model runs on something that is no share of a batch, and the same on all ranks."""
        self.apart = True
        try:
            yield
        finally:
            self.apart = False

    def refuse_one_value(self, layer: str, shape: tuple[int, ...], place: int, shares: int) -> None:
        """Raise ``RefusedError`` for a layer that gets one value a channel on the share at ``place`` of ``shares``.

        A compiler leaves it out: of what is raised inside of its own code some versions make an error of theirs.
        """
        cut = f" in {self.pieces} micro-batches" if self.pieces > 1 else ""
        ways = [
            *(["a larger micro_batch"] if cut else []),
            "another batch size",
            *(["fewer devices", "exactness math"] if shares > 1 else []),
        ]
        raise RefusedError(
            f"batch normalisation (layer {layer!r}) of one value a channel, input {shape}, on rank {place} of "
            f"{shares}, which holds {self.samples} of the {self.total} samples of a batch{cut}",
            "training needs more than 1 value, and at exactness loose each device uses its own",
            f"use {' or '.join(ways)}",
        )

    def take(self, share: Share) -> None:
        """Take up another share."""
        self.counts, self.pieces = share.count > 0, len(share.micro)
        self.samples, self.total = share.count, share.total
        self.meeting.clear()
        for begin in self.begins:
            begin()
