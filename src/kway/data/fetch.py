"""Read samples one by one and make a batch of them: the same in the rank's process and in its workers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kway.data.generators import preserved, seed_generators
from kway.data.order import Indices, key


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

    The process's own random state is not put back.
    """
    seed_generators(key(seed, "collate", request.epoch, request.step, request.first))
    return collate(samples)
