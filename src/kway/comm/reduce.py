"""Gradients of all ranks summed, in whatever order the back end sums."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kway.comm.buckets import BucketedSum
from kway.comm.flat import FlatGradients
from kway.comm.group import Group
from kway.comm.sparse import SparseReducer


class GradientReducer:
    """Sums the gradients of ``parameters`` over ``group``, together with a vector of ``scalars`` numbers, the last
    of which is the reducer's own.

    One all-reduce for each dtype, or for each bucket of a larger model. The gradients of the parameters named in
    ``tables`` may be sparse and stay so, by a gather of their rows; a sparse gradient of another parameter becomes
    dense. ``frozen``: the model's other parameters, which have no gradient. ``limit``: bytes of a bucket,
    ``BUCKET_BYTES`` if ``None``. ``large_apart``: whether large gradients are sent without a copy, see ``comm.apart``;
    on GPUs if ``None``. On a CPU a back end would write to them while hooks of the user's read them.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        scalars: int,
        tables: Collection[torch.nn.Parameter] = (),
        frozen: Collection[torch.nn.Parameter] = (),
        limit: int | None = None,
        large_apart: bool | None = None,
    ) -> None:
        self.parameters, self.group = list(parameters), group
        wanted = {id(table) for table in tables}
        sparse = [parameter for parameter in self.parameters if id(parameter) in wanted]
        dense = [parameter for parameter in self.parameters if id(parameter) not in wanted]
        if large_apart is None:
            large_apart = any(parameter.is_cuda for parameter in dense)
        self.flat = FlatGradients(dense, scalars, beside=[*sparse, *frozen], large_apart=large_apart)
        self.buckets = BucketedSum(self.flat, group.apart(), limit)
        self.sparse = SparseReducer(sparse, group)
        vectors, apart = self.flat.vectors, [*self.flat.apart]
        self._text = f"gradients{[(len(vector), vector.dtype) for vector in vectors]}{apart}".encode()

    @property
    def sends_ahead(self) -> bool:
        """Whether anything can be sent before backward has ended."""
        return self.buckets.several

    @property
    def kept_bytes(self) -> tuple[int, int]:
        """Bytes beside the gradients that stay from step to step, and what more did so in the first steps.

        The former are the vectors, and copies of large gradients that cannot be sent as they lie. Where there are
        several buckets the first WATCHED_STEPS steps copy all large ones.
        """
        apart = self.flat.apart
        first = apart.nbytes - apart.copied_bytes if self.buckets.several else 0
        return self.flat.nbytes + apart.copied_bytes, first

    def sending(self) -> AbstractContextManager[None]:
        """Send what is complete while the last gradients of this rank are computed inside, ahead of ``reduce``.

        Not where anything that is computed inside communicates: the order would not be that of the other ranks.
        """
        return self.buckets.sending() if self.sends_ahead else nullcontext()

    def reduce(self, numbers: torch.Tensor, counts: bool = True) -> torch.Tensor:
        """Sum gradients and ``numbers`` over the ranks; return what adds up to the summed numbers, in float64.

        ``numbers``: shape (n,), on the device; the last one is 0, and afterwards NaN where a gradient of another rank
        changed after it was sent (see ``Buckets``). What is returned has shape (parts, n), and is to be
        read before ``divide_``, behind whose gradients it lies.
        ``counts=False``: this rank holds no sample. Afterwards every gradient is equal on all ranks, and ``None``
        where no rank had one; dense ones are views into flat vectors, or lie apart. Raises ``RefusedError`` as
        ``Buckets.finish``.
        """
        self.group.trace.add(self._text)
        complete = self.buckets.finish(numbers, counts)
        self.flat.hand_out(complete)
        self.sparse.reduce(counts)
        return self.flat.parts

    def divide_(self, divisor: torch.Tensor) -> None:
        """Divide all gradients by a scalar tensor, in place."""
        self.flat.divide_(divisor)
        self.sparse.divide_(divisor)
