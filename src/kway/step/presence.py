"""What the layers that look at the global batch must know of the share that is being computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kway.data.share import Share
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

    def take(self, share: Share) -> None:
        """Take up another share."""
        self.counts, self.pieces = share.count > 0, len(share.micro)
        self.samples, self.total = share.count, share.total
        self.meeting.clear()
        for begin in self.begins:
            begin()
