"""A recorder for CPUs that does again what a device would: the operations alone, on the tensors that they had.

Unlike the double of ``tests.step.recorded`` it runs no Python of the model's: what a recording misses shows in numbers.
"""

import torch
from tests.step.recorded import Double, Nowhere
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


class Operations(TorchDispatchMode):
    """Notes the operations below autograd, each with its tensors and what it gave."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation.namespace != "profiler":
            self.noted.append((operation, _bare(args), _bare(kwargs or {}), _bare(result)))
        return result


class Replaying:
    def __init__(self, noted):
        self._noted, self.replays = noted, 0

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for operation, args, kwargs, result in self._noted:
                again = operation(*args, **kwargs)
                for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)

    def seed(self, keys):
        pass

    def close(self):
        pass


class Recorder(Double):
    """Runs the work once to note it, and puts back what that changed."""

    def record(self, work, places):
        kept = [(value, value.detach().clone()) for value in self._all()]
        with Operations() as operations:
            work(Nowhere())
        with torch.no_grad():
            for value, before in kept:
                value.copy_(before)
        self.made.append(Replaying(operations.noted))
        return self.made[-1]


def _bare(values):
    with _disable_current_modes(), torch.no_grad():
        return tree_map(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, values)
