"""Read samples and make a batch of them: the same in the rank's process and in its workers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any, NamedTuple

from torch.utils.data import Subset, default_collate

from kway.data.generators import preserved, same, seed_generators, states
from kway.data.order import Indices, key
from kway.errors import DataError
from kway.units import counted

# In what torch's collate function says of samples that do not go into one tensor.
_UNEVEN = "equal size"


class Request(NamedTuple):
    """What to read: the samples ``indices``, from position ``first`` of batch ``step`` of ``epoch`` on."""

    epoch: int
    step: int
    first: int
    indices: Indices


@dataclass
class Fetcher:
    """Reads each sample under random generators seeded by (seed, epoch, index).

    So an augmentation depends on neither ranks nor workers. ``collate`` draws from a seed of the batch and
    the share's first position in it. The process's own random state is put back.

    A data set with ``__getitems__`` is asked for all samples of a request at once, as torch's ``DataLoader`` does.
    Where that draws random numbers it is asked for one at a time from then on: else a sample's numbers would depend on
    which others are read with it. What it returns in place of a list, for one sample too, is a batch, which ``collate``
    gets as it is.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    seed: int
    _draws: bool = field(default=False, init=False)

    def fetch(self, request: Request) -> Any:
        """Return the collated batch, or the list of samples where there is no ``collate``."""
        with preserved():
            if _gives_several(self.dataset):
                samples = self._at_once(request)
            else:
                samples = self._one_by_one(request, partial(getitem, self.dataset))
            return samples if self.collate is None else collated(self.collate, samples, self.seed, request)

    def _one_by_one(self, request: Request, get: Callable[[int], Any]) -> list[Any]:
        found = []
        for index in request.indices.tolist():
            seed_generators(key(self.seed, "sample", request.epoch, index))
            found.append(get(index))
        return found

    def _at_once(self, request: Request) -> Any:
        """Return the list of samples, or a batch of them that the data set has made."""
        if not self._draws and len(request.indices) > 1:
            seed_generators(key(self.seed, "samples", request.epoch, request.step, request.first))
            before = states()
            found = _several(self.dataset, request.indices.tolist())
            # A batch is taken as it is, whatever was drawn for it: it has no samples to ask for.
            self._draws = isinstance(found, list | tuple) and not same(before, states())
            if not self._draws:
                return found
        found = self._one_by_one(request, lambda index: _several(self.dataset, [index]))
        return found[0] if len(found) == 1 else [sample for (sample,) in found]


def _gives_several(dataset: Any) -> bool:
    """Whether a data set gives several samples at once. A ``Subset`` does where the data set in it does."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def _several(dataset: Any, indices: list[int]) -> Any:
    """Return several samples at once, or a batch. Raises ``DataError`` for a list of another length."""
    found = dataset.__getitems__(indices)
    if isinstance(found, list | tuple) and len(found) != len(indices):
        raise DataError(
            f"__getitems__ of {type(dataset).__name__} returned {counted(len(found), 'sample')} where "
            f"{len(indices):,} were asked for",
            "one sample for each index, in their order",
        )
    return found


def collated(collate: Callable[[Any], Any], samples: Any, seed: int, request: Request) -> Any:
    """Make a batch of the list ``samples``, under generators seeded by where they stand in which global batch.

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
