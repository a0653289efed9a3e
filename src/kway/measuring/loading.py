"""How many samples a second worker processes deliver to a loop that does nothing else, by their number."""

from contextlib import ExitStack

import torch
from torch.utils.data import Dataset, default_collate

from kway.data.fetch import Fetcher, Request
from kway.data.order import Indices
from kway.data.workers import Workers
from kway.measuring.timer import Work
from kway.measuring.work import lazily, waited

BATCH, BATCHES = 16, 12


class Crafted(Dataset[torch.Tensor]):
    """Samples that take some tenths of a millisecond of a processor each, as a small image that is augmented does."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.rand(3, 32, 32)
        for _ in range(16):
            image = image.flip(2).roll(index % 7, 1).mul(0.9).add(0.1)
        return image


def requests(indices: Indices) -> list[Request]:
    """Return the requests of an epoch."""
    return [Request(0, step, 0, indices[step * BATCH : (step + 1) * BATCH]) for step in range(BATCHES)]


def work(workers: int, opened: ExitStack) -> Work:
    """Return epochs over the samples, read by that many workers; by this process where there are none.

    The workers stay, and are ended with ``opened``.
    """

    def make() -> Work:
        fetcher = Fetcher(Crafted(), default_collate, 0)
        epoch = requests(torch.arange(BATCH * BATCHES).numpy())
        if not workers:
            return waited(lambda: [fetcher.fetch(request) for request in epoch], lambda: None)
        # More of them than processors are what the knee is looked for with.
        held = Workers(fetcher, workers, None, 0, named=False)
        opened.callback(held.close)
        list(held.read(iter(epoch[:1])))  # starts them
        return waited(lambda: list(held.read(iter(epoch))), lambda: None)

    return lazily(make)


def counts(processors: int) -> list[int]:
    """Return the numbers of workers to try: none, and powers of two up to twice the processors."""
    found = [0, 1]
    while found[-1] < 2 * processors:
        found.append(2 * found[-1])
    return found
