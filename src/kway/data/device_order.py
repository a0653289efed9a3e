"""The order of an epoch worked out on a device: few launches, and none is waited for, from 256 samples on."""

import numpy as np
import torch

from kway.data.order import KeyedOrder
from kway.data.permutation import Network

Tensor = torch.Tensor
_CHUNK = 1 << 22  # positions that are worked out at a time: it takes some 40 bytes for each


def order_on(device: torch.device, order: KeyedOrder, epoch: int) -> Tensor:
    """Return the data set indices of an epoch in their order: int64, shape (samples,), on ``device``.

    The same numbers as ``order.at``. What a round of the network adds depends on half of a position alone, of which
    there are some sqrt(samples): that is worked out on the host, and so are the few positions that take more than one
    pass.
    """
    if not order.shuffle:
        return torch.arange(order.samples, device=device)
    network = Network.of(order.samples, order.seed_of(epoch))
    if network.is_sparse:
        return torch.from_numpy(order.at(epoch, np.arange(order.samples))).to(device)
    here = network.tables()
    parts = [*here, *network.detours(here)]
    *tables, late, ends = torch.split(_sent(np.concatenate(parts), device), [len(part) for part in parts])
    found = torch.empty(order.samples, dtype=torch.int64, device=device)
    for start in range(0, order.samples, _CHUNK):
        right = torch.arange(start, min(start + _CHUNK, order.samples), device=device)
        left = torch.div(right, network.other, rounding_mode="floor")
        right.remainder_(network.other)
        for index, table in enumerate(tables):
            moved, by, size = (right, left, network.other) if index % 2 else (left, right, network.side)
            moved.add_(table.index_select(0, by)).remainder_(size)
        torch.add(right, left, alpha=network.other, out=found[start : start + len(right)])
    return found.index_copy_(0, late, ends)


def _sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    here = torch.from_numpy(numbers)
    # What is not pinned is waited for.
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)
