"""Take the user's data apart: the data set, the order of its samples, and how samples become a batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from kway.data.arrays import in_memory
from kway.data.order import KeyedOrder, Order, check_batch_size
from kway.data.samplers import BatchSamplerOrder, SamplerOrder
from kway.data.streams import StreamOrder, is_stream, length
from kway.data.streams import notices as stream_notices
from kway.errors import DataError, UsageError

DEFAULT_BATCH_SIZE = 256
KEPT = "drop_last of the DataLoader is not kept: every sample counts"
RESIZED = "batch size "


@dataclass(frozen=True)
class Parts:
    """What the user's data consists of.

    ``dataset`` has ``len()`` and gives samples by index, or is a stream where ``order`` is a ``StreamOrder``;
    ``order`` says which samples form a batch; ``collate``
    makes a batch from a list of samples, and is ``None`` where ``dataset`` is in memory and gives batches
    itself; ``workers`` is the number of loader processes a rank; ``worker_init`` is called in each with its
    number; ``notices`` are lines for the user.
    """

    dataset: Any
    order: Order
    collate: Callable[[list[Any]], Any] | None
    workers: int
    worker_init: Callable[[int], None] | None = None
    notices: list[str] = field(default_factory=list)


def take_apart(
    data: Any,
    *,
    batch_size: int | None,
    seed: int,
    shuffle: bool,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int | None = None,
    every: bool = False,
) -> Parts:
    """Take apart a data set, a stream, tensors, arrays (alone, in a tuple, list or dict) or a ``DataLoader``.

    ``batch_size`` is the global one, and counts instead of a ``DataLoader``'s, with a notice; ``None`` means the
    ``DataLoader``'s, or 256. ``shuffle`` False keeps the
    order of the data set (evaluation); a ``DataLoader`` that does not shuffle is not shuffled. ``every``: the
    last batch is kept whatever a ``DataLoader`` says, because every sample counts. Raises
    ``UsageError`` for what cannot be spread over ranks, and ``DataError`` for an empty or uneven data set. An
    empty stream shows when it is read.
    """
    parts = _taken(data, batch_size, seed, shuffle, collate, workers, every)
    if isinstance(parts.order, StreamOrder):
        return parts
    if not parts.order.steps(0):
        raise DataError(
            f"{parts.order.samples} samples and batches of {parts.order.batch_size} with drop_last",
            "at least one whole batch",
            "use a smaller batch, or keep the last one",
        )
    return parts


def _taken(
    data: Any,
    batch_size: int | None,
    seed: int,
    shuffle: bool,
    collate: Callable[[list[Any]], Any] | None,
    workers: int | None,
    every: bool,
) -> Parts:
    if batch_size is not None:
        batch_size = check_batch_size(batch_size)
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise UsageError(f"workers {workers!r}", "a whole number of loader processes, from 0")
    if isinstance(data, str | bytes):
        raise UsageError(
            f"data {data!r}, a text",
            "a data set, tensors or arrays, or a DataLoader",
            "open it first; data sets that kway knows by name are for the command line (--data)",
        )
    if isinstance(data, type):
        raise UsageError(
            f"data that is the class {data.__name__}", "a data set", f"make one: {data.__name__}()"
        )
    if isinstance(data, DataLoader):
        return _from_loader(data, batch_size, seed, shuffle, collate, workers, every)
    if is_stream(data):
        read_by = StreamOrder(length(data), batch_size or DEFAULT_BATCH_SIZE)
        return _stream(data, read_by, shuffle, collate, workers or 0, None)
    samples = _count(data)
    order = KeyedOrder(samples, batch_size or DEFAULT_BATCH_SIZE, seed, shuffle)
    return _parts(data, order, collate, workers or 0, None, [])


def _parts(
    data: Any,
    order: Order,
    collate: Callable[[list[Any]], Any] | None,
    workers: int,
    worker_init: Callable[[int], None] | None,
    notices: list[str],
) -> Parts:
    if collate is None or collate is default_collate:
        held = in_memory(data)
        if held is not None:
            if workers:
                notices.append(
                    f"the data is in memory: read by indexing, {workers} loader workers not started"
                )
            return Parts(held, order, None, 0, None, notices)
    return Parts(in_memory(data) or data, order, collate or default_collate, workers, worker_init, notices)


def _stream(
    data: Any,
    order: StreamOrder,
    shuffle: bool,
    collate: Callable[[list[Any]], Any] | None,
    workers: int,
    worker_init: Callable[[int], None] | None,
) -> Parts:
    notices = stream_notices(data, order, shuffle, workers)
    # Two workers would have to split the stream: it may do so itself, or not, and nobody can tell.
    return Parts(data, order, collate or default_collate, min(workers, 1), worker_init, notices)


def _count(data: Any) -> int:
    """Return the number of samples. Raises where there are none, or no number, or no access by index."""
    kind = type(data).__name__
    held = in_memory(data)
    source = data if held is None else held
    if not hasattr(source, "__getitem__"):
        raise UsageError(
            f"data of type {kind}", "a data set with __len__ and __getitem__, or __iter__; tensors or arrays"
        )
    try:
        samples = len(source)
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"data of type {kind} has no len()", "the number of samples", "give it __len__"
        ) from None
    if samples < 1:
        raise DataError(f"an empty data set ({kind}, 0 samples)", "at least 1 sample")
    return samples


def _from_loader(
    loader: DataLoader[Any],
    batch_size: int | None,
    seed: int,
    shuffle: bool,
    collate: Callable[[list[Any]], Any] | None,
    workers: int | None,
    every: bool,
) -> Parts:
    data: Any = loader.dataset
    batches: Any = loader.batch_sampler
    if batches is None:
        raise UsageError(
            "a DataLoader with batch_size=None",
            "samples, not ready batches",
            "pass the data set and a batch_size",
        )
    chosen = loader.num_workers if workers is None else workers
    if is_stream(data):
        size = batch_size or batches.batch_size
        read_by = StreamOrder(length(data), size, batches.drop_last and not every)
        parts = _stream(data, read_by, shuffle, collate or loader.collate_fn, chosen, loader.worker_init_fn)
        parts.notices.extend(_resized(size, batches.batch_size))
        if batches.drop_last and every:
            parts.notices.append(KEPT)
        return parts
    samples = _count(data)
    for sampler in (batches, getattr(batches, "sampler", None), loader.sampler):
        if hasattr(sampler, "num_replicas"):
            raise UsageError(
                f"a DataLoader with a {type(sampler).__name__}",
                "kway splits the batch itself",
                "pass the data set, or a DataLoader without this sampler",
            )
    order: Order
    notices: list[str] = []
    if type(batches) is BatchSampler:
        size = batch_size or batches.batch_size
        sampler, drop_last = batches.sampler, batches.drop_last
        notices.extend(_resized(size, batches.batch_size))
        if drop_last and every:
            drop_last = False
            notices.append(KEPT)
        if drop_last and samples % size:
            notices.append(
                f"drop_last of the DataLoader is kept: the last {samples % size} samples are left out"
            )
        if _is_plain(sampler, samples):
            shuffled = shuffle and type(sampler) is RandomSampler
            order = KeyedOrder(samples, size, seed, shuffled, drop_last)
        else:
            order = SamplerOrder(sampler, samples, size, seed, data, drop_last)
    else:
        order = BatchSamplerOrder(batches, samples, seed, data)
        _agree(batch_size, batches)
    if not isinstance(order, KeyedOrder):
        notices.append(
            f"{type(order.sampler).__name__} is replayed in every process, seeded by seed and epoch"
        )
    return _parts(data, order, collate or loader.collate_fn, chosen, loader.worker_init_fn, notices)


def _is_plain(sampler: object, samples: int) -> bool:
    """Whether a sampler gives every sample of the data set once: then the order needs no replay."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == samples
    return type(sampler) is SequentialSampler and len(sampler) == samples


def _resized(size: int, own: int) -> list[str]:
    return [] if size == own else [f"{RESIZED}{size} instead of the DataLoader's {own}"]


def _agree(wanted: int | None, batches: Any) -> None:
    """Raise ``UsageError`` where a size is asked for beside batches that somebody else makes."""
    own = getattr(batches, "batch_size", None)
    if wanted is not None and wanted != own:
        raise UsageError(
            f"batch_size={wanted} and a DataLoader with a batch sampler of its own ({type(batches).__name__}"
            + (f", batch_size={own})" if own else ")"),
            "it alone says which samples make a batch",
            "leave batch_size (--batch-size) out, or pass the data set instead of the DataLoader",
        )
