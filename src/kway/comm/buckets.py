"""Gradients reduced in buckets, the first of them while backward still computes the rest."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kway.comm.flat import FlatGradients, Piece
from kway.comm.group import Group
from kway.comm.tree import Span, TreeReducer
from kway.errors import RefusedError

Tensor = torch.Tensor
Vectors = list[Tensor]

# As much as hides the start of a collective. Small models have one bucket, and no more work than without.
BUCKET_BYTES = 25 * 2**20
# Steps in which the host waits to hear whether a gradient changed after it was sent, on any rank.
WATCHED_STEPS = 2


@dataclass(frozen=True)
class Bucket:
    """Entries [start, stop) of a flat vector, and the parameters whose gradients lie there, or travel beside it."""

    vector: int
    start: int
    stop: int
    parameters: tuple[int, ...]


def usual_bytes(gradients: int, cuts_code: bool) -> int:
    """Return the bytes of a bucket where nobody chose them, for so many bytes of ``gradients``.

    ``cuts_code``: whether compiled code is cut where a bucket is full. Then a bucket costs what was one kernel before
    and is two now: in as much time ``BUCKET_BYTES`` are sent, about. Of n buckets the last one is not hidden. What the
    two cost together, c n + t / n with t = g c / b for g bytes of gradients and b = ``BUCKET_BYTES``, is least for
    n = sqrt(g / b), buckets of sqrt(g b).
    """
    return max(BUCKET_BYTES, math.isqrt(gradients * BUCKET_BYTES)) if cuts_code else BUCKET_BYTES


def cut(
    pieces: Sequence[Piece],
    widths: Sequence[int],
    tail: int,
    limit: int,
    length: int,
    homes: Sequence[int] | None = None,
) -> list[Bucket]:
    """Cut flat vectors into buckets of about ``limit`` bytes, in the order in which backward completes them.

    Backward reaches the last parameters first. ``widths``: bytes of an entry by vector. What comes before the
    first parameter of vector ``tail`` (all of its ``length``, if there is none) is known only after backward: it
    belongs to the last bucket of all. ``homes``: see ``FlatGradients``; what lies in no vector has its home's width.
    """
    homes = range(len(widths)) if homes is None else homes
    buckets: list[Bucket] = []
    open_: dict[int, list[int]] = {}
    entries = dict.fromkeys(homes, 0)
    for place in reversed(range(len(pieces))):
        number, start, stop = pieces[place]
        home = homes[number]
        open_.setdefault(home, []).append(place)
        entries[home] += stop - start
        if entries[home] * widths[home] >= limit:
            buckets.append(_bucket(home, open_.pop(home), pieces))
            entries[home] = 0
    buckets += [_bucket(home, held, pieces) for home, held in open_.items() if home != tail]
    last = _bucket(tail, open_.get(tail, []), pieces)
    first = min((start for number, start, _ in pieces if number == tail), default=length)
    return [*buckets, replace(last, start=0, stop=last.stop or first)]


def _bucket(home: int, places: Sequence[int], pieces: Sequence[Piece]) -> Bucket:
    """Make a bucket of neighbours, the last one first; without entries of the vector where all of them lie apart."""
    inside = [pieces[place] for place in places if pieces[place][0] == home]
    start, stop = (inside[-1][1], inside[0][2]) if inside else (0, 0)
    return Bucket(home, start, stop, tuple(places))


class Buckets(ABC):
    """Reduces the gradients of ``flat`` over ``group``, bucket by bucket and in the same order on all ranks.

    ``group`` has no trace: when a bucket is sent depends on the rank. The last number of ``flat`` is this
    class's own: 0, or NaN where on any rank a gradient changed after its bucket was sent, as those of a parameter that
    reentrant checkpoints reach twice. In the first WATCHED_STEPS steps such gradients are reduced again, and from then
    on all are sent after backward. Later, to know in time would cost a wait in every step: the rank where it happens
    raises, and the others have a NaN.
    ``limit``: bytes of a bucket, ``BUCKET_BYTES`` if ``None``. ``in_place``: whether what ``begin`` has begun on a CPU
    writes into the vectors before it is asked for.
    """

    in_place = False

    def __init__(self, flat: FlatGradients, group: Group, limit: int | None = None) -> None:
        self.flat, self.group = flat, group
        widths = [vector.element_size() for vector in flat.vectors]
        size = BUCKET_BYTES if limit is None else limit
        # One device has nobody to wait for.
        limit = size if group.size > 1 else sys.maxsize
        self.buckets = cut(
            flat.pieces, widths, flat.carrier, limit, len(flat.vectors[flat.carrier]), flat.homes
        )
        device = flat.vectors[0].device
        stream: Any = torch.cuda.Stream
        beside = device.type == "cuda" and group.size > 1
        self._stream: Any = stream(device) if beside else None
        self._early, self._watched = group.size > 1, WATCHED_STEPS
        self._missing: list[set[int]] = []
        self._sent: dict[int, tuple[Tensor | None, int]] = {}
        self._pending: list[Callable[[], None]] = []
        # Of a step that failed, what may still write into the vectors.
        self._abandoned: list[Callable[[], None]] = []

    @property
    def several(self) -> bool:
        """Whether anything can be sent before backward has ended."""
        return self._early and len(self.buckets) > 1

    @abstractmethod
    def begin(self, bucket: Bucket, tensors: Vectors) -> Callable[[], None]:
        """Start to reduce flat tensors, this rank's entries of a bucket, in place; what is returned waits for it.

        The first ones are those of the vector, if there are any, and then come the gradients that lie apart.
        """

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Reduce what is complete while the last gradients of this rank are computed inside."""
        self._sent, self._pending = {}, []
        trained = [place for place, p in enumerate(self.flat.parameters) if p.requires_grad]
        # The last bucket holds what is known after backward only.
        self._missing = [set(bucket.parameters).intersection(trained) for bucket in self.buckets[:-1]]
        handles = []
        if self._early:
            for number, missing in enumerate(self._missing):
                for place in sorted(missing):
                    parameter: Any = self.flat.parameters[place]
                    hook = partial(self._ready, number, place)
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, scalars: Tensor, counts: bool) -> bool:
        """Reduce the rest and wait for all. Afterwards the vectors of ``flat`` hold what was reduced.

        ``scalars``, ``counts``: as for ``FlatGradients.collect``; the last of the numbers is 0.
        Return whether every parameter had a gradient that counts. A collective. Raises ``RefusedError`` for a
        gradient that changed too late for the first time after WATCHED_STEPS steps. Whatever it raises, the next
        reduction begins anew.
        """
        try:
            complete = self._finished(scalars, counts)
        except BaseException:
            self._abandon()
            raise
        self._forget()
        return complete

    def _finished(self, scalars: Tensor, counts: bool) -> bool:
        for number in range(len(self._pending), len(self.buckets) - 1):
            self._launch(number, counts)
        late = [place for place in self._sent if not self._unchanged(place)]
        if late:
            scalars[-1] = math.nan
        complete = self.flat.note(scalars, counts)
        self._launch(len(self.buckets) - 1, counts)
        self._complete()
        watched = self._watched > 0 and self._early and len(self.buckets) > 1
        self._watched -= watched
        if watched and math.isnan(float(self.flat.scalars[-1])):
            self._early, self._pending = False, []
            scalars[-1] = 0.0
            self.flat.note(scalars, counts)
            for number in range(len(self.buckets)):
                self._launch(number, counts)
            self._complete()
        elif late:
            shape = tuple(self.flat.parameters[late[0]].shape)
            raise RefusedError(
                f"the gradient of parameter number {late[0]}, shape {shape}, changed after it was sent",
                f"backward reached it twice, as it did not in the first {WATCHED_STEPS} steps",
                "use checkpoint(..., use_reentrant=False)",
            )
        return complete

    def _forget(self) -> None:
        self._sent, self._pending = {}, []

    def _abandon(self) -> None:
        """Drop what a step that failed has begun. Nobody may touch the vectors before that is done with them."""
        if self._stream is not None:
            self._complete()
        elif self.in_place:
            # The other ranks may never come: only one that goes on waits for them, and then they come.
            self._abandoned += self._pending
        self.flat.apart.forget()
        self._forget()

    def _ready(self, number: int, place: int, _: Tensor) -> None:
        self._missing[number].discard(place)
        # Collectives must come in one order on all ranks: a bucket waits for those before it.
        while len(self._pending) < len(self._missing) and not self._missing[len(self._pending)]:
            self._launch(len(self._pending), True)

    def _launch(self, number: int, counts: bool) -> None:
        while self._abandoned:
            # What failed there was said then.
            with suppress(Exception):
                self._abandoned.pop(0)()
        bucket = self.buckets[number]
        vector = self.flat.vectors[bucket.vector][bucket.start : bucket.stop]
        with self._beside():
            self.flat.copy_in(bucket.parameters, counts)
            # A gradient that may have to be sent again must stay what it is.
            apart = self.flat.apart.take(bucket.parameters, counts, not (self._watched and self.several))
            complete = self.begin(bucket, [vector, *apart] if len(vector) or not apart else apart)
            if number < len(self.buckets) - 1:
                self._sent.update((place, self._state(place)) for place in bucket.parameters)
            self._pending.append(complete)
            # On a GPU nothing waits here but the stream, so the rest can follow at once.
            if self._stream is not None:
                complete()

    def _complete(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            return
        for complete in self._pending:
            complete()

    def _beside(self) -> Any:
        """Enter the stream of reductions, behind what computed the gradients."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _state(self, place: int) -> tuple[Tensor | None, int]:
        grad = self.flat.parameters[place].grad
        return grad, -1 if grad is None else grad._version

    def _unchanged(self, place: int) -> bool:
        grad, version = self._state(place)
        return grad is self._sent[place][0] and version == self._sent[place][1]


class BucketedTree(Buckets):
    """Completes ``tree``: the same bits on any number of ranks."""

    def __init__(self, flat: FlatGradients, tree: TreeReducer, limit: int | None = None) -> None:
        super().__init__(flat, tree.group, limit)
        self.tree = tree
        self._partials: dict[Span, Vectors] = {}
        self._spine: list[Vectors] = []

    @contextmanager
    def during_backward(self, partials: dict[Span, Vectors], spine: list[Vectors]) -> Iterator[None]:
        """Reduce what is complete while the last shard of this rank is computed inside.

        ``partials``: this rank's other nodes of the tree. ``spine``: the left sums on the way from its last node
        down to its last shard. Both stay as they are until ``finish``.
        """
        self._partials, self._spine = partials, spine
        with self.sending():
            yield

    def begin(self, bucket: Bucket, tensors: Vectors) -> Callable[[], None]:
        """Start to complete the tree for one bucket, all of it in its vector: see ``Buckets.begin``."""
        (vector,) = tensors
        own = vector
        for left in reversed(self._spine):
            own = left[bucket.vector][bucket.start : bucket.stop] + own
        nodes = {
            span: parts[bucket.vector][bucket.start : bucket.stop] for span, parts in self._partials.items()
        }
        nodes[self.tree.own[-1]] = own
        root = self.tree.begin(nodes)

        def complete() -> None:
            vector.copy_(root())

        return complete

    def _forget(self) -> None:
        super()._forget()
        self._partials, self._spine = {}, []


class BucketedSum(Buckets):
    """Sums in whatever order the back end sums."""

    in_place = True

    def begin(self, bucket: Bucket, tensors: Vectors) -> Callable[[], None]:
        """Start to sum one bucket: see ``Buckets.begin``."""
        return self.group.begin_sums(tensors)
