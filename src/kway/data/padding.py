"""Whether parts of one batch came in several shapes: padded to the longest sample of a part, not of the batch."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from kway.data.parts import Parts
from kway.data.share import Share
from kway.data.structure import tensors

# Where samples differ in length, the first batches show it; later ones cost nothing.
_BATCHES = 64

# The shape of every tensor of a part beside how many samples it holds, or None where that is none of its sizes.
Sizes = list[tuple[int, ...] | None]
# By (epoch, step), the shapes of a rank's parts of that batch.
Seen = dict[tuple[int, int], list[Sizes]]


class Shapes:
    """The shapes in which one rank's parts of the first batches came.

    Looked at only where a collate function of the user's made them, and where there are no ``shards``: what shards
    hold does not depend on the number of ranks. Shapes are known to the host: no device is waited for.
    """

    def __init__(self, parts: Parts, shards: int | None) -> None:
        self.watched = shards is None and parts.collate not in (None, default_collate)
        self.seen: Seen = {}

    def take(self, share: Share) -> None:
        """Look at a share."""
        batch = (share.epoch, share.step)
        if self.watched and len(self.seen) < _BATCHES and batch not in self.seen:
            # What no sample counts in is there to keep ranks in step, and changes no figure.
            parts = [_sizes(batch, count) for batch, count in share.micro if count]
            self.seen[batch] = parts


def uneven(everyone: Callable[[Any], Sequence[Any]], *shapes: Shapes) -> list[str]:
    """Return a line for the user where parts of one batch came in several shapes, or none.

    ``everyone`` hands in one value and returns that of every rank: a collective, called where shapes are watched,
    which is so on all ranks or on none.
    """
    watched = [own.seen for own in shapes if own.watched]
    if not watched:
        return []
    for of_ranks in zip(*everyone(watched), strict=True):
        for batch in of_ranks[0]:
            parts = [part for seen in of_ranks for part in seen.get(batch, [])]
            found = _two_shapes(parts)
            if found is not None:
                return [_text(*found, *batch)]
    return []


def _sizes(batch: Any, count: int) -> Sizes:
    found: Sizes = []
    # What is packed is not padded.
    for tensor in tensors(batch, (PackedSequence,)):
        # What has no row a sample is not padded: samples one after the other, or a graph's edges.
        rest = [] if tensor.is_nested else [int(size) for size in tensor.shape]
        if count in rest[:2]:
            rest.remove(count)
            found.append(tuple(rest))
        else:
            found.append(None)
    return found


def _two_shapes(parts: list[Sizes]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return two shapes of one tensor, beside the samples, in which it came; ``None``: it always came in one."""
    for of_tensor in zip(*parts, strict=False):
        # A tensor that has no other size cannot be padded; that it has the samples' may be chance.
        known = list(dict.fromkeys(sizes for sizes in of_tensor if sizes))
        if len(known) > 1:
            return known[0], known[1]
    return None


def _text(one: tuple[int, ...], other: tuple[int, ...], epoch: int, step: int) -> str:
    return (
        f"the collate function gave samples of shape {one} and {other} in parts of one batch (epoch {epoch + 1}, batch "
        f"{step + 1}): where padding counts, the result depends on the number of devices (docs/guide/exactness.md, "
        '"Padding that counts")'
    )
