"""Read samples one by one and make a batch of them: the same in the rank's process and in its workers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from kway.data.generators import preserved, seed_generators
from kway.data.order import Indices, key
from kway.errors import DataError

# In what torch's collate function says of samples that do not go into one tensor.
_UNEVEN = "equal size"


class Request(NamedTuple):
    """What to read: the samples ``indices``, from position ``first`` of batch ``step`` of ``epoch`` on."""

    epoch: int
    step: int
    first: int
    indices: Indices


@dataclass(frozen=True)
class Fetcher:
    """Reads each sample under random generators seeded by (seed, epoch, index).

    So an augmentation depends on neither ranks nor workers. ``collate`` draws from a seed of the batch and
    the share's first position in it. The process's own random state is put back.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    seed: int

    def fetch(self, request: Request) -> Any:
        """Return the collated batch, or the list of samples where there is no ``collate``."""
        with preserved():
            samples = []
            for index in request.indices.tolist():
                seed_generators(key(self.seed, "sample", request.epoch, index))
                samples.append(self.dataset[index])
            return samples if self.collate is None else collated(self.collate, samples, self.seed, request)


def collated(collate: Callable[[list[Any]], Any], samples: list[Any], seed: int, request: Request) -> Any:
    """Make a batch of ``samples``, under generators seeded by where they stand in which global batch.

    The process's own random state is not put back. Raises ``DataError`` where torch's own collate function finds
    samples of several sizes.
    """
    seed_generators(key(seed, "collate", request.epoch, request.step, request.first))
    if collate is not default_collate:
        return collate(samples)
    try:
        return default_collate(samples)
    except RuntimeError as error:
        if _UNEVEN not in str(error):
            raise
        text = str(error)
    # Without the frames of torch, of which none is the user's.
    raise DataError(
        f"samples that make no batch ({text})",
        "samples of one size",
        "pass a DataLoader with a collate_fn that pads them, or let the data set do so",
    )
