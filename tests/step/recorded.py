"""A double for the device's recorder, and jobs whose steps are recorded.

It does the work again by calling it, on tensors that stay where they are, as a device does that was told to; what the
host would do otherwise between two calls is what tests look for.
"""

import torch
from torch import nn

import kway
from kway.data.loader import Share
from kway.step.graph import GraphedStep
from kway.step.telling import EACH_STEP
from kway.strategies.engine import Engine
from kway.world import World


class Recording:
    def __init__(self, work, model):
        self.work, self.model, self.replays, self.keys, self.closed = work, model, 0, [], False
        self.grads = [parameter.grad for parameter in model.parameters()]

    def replay(self):
        self.replays += 1
        self.work(Nowhere())
        for parameter, place in zip(self.model.parameters(), self.grads, strict=True):
            if place is not None:
                place.copy_(parameter.grad)
            parameter.grad = place

    def seed(self, keys):
        self.keys.append(list(keys))

    def close(self):
        self.closed = True


class Nowhere:
    def at(self, place):
        pass


class Double:
    """Records by remembering the work, which it runs once: a device would not, so that the model is put back."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.made = model, optimizer, []

    def record(self, work, places):
        kept = [value.detach().clone() for value in self._all()]
        work(Nowhere())
        with torch.no_grad():
            for value, before in zip(self._all(), kept, strict=True):
                value.copy_(before)
        self.made.append(Recording(work, self.model))
        return self.made[-1]

    def _all(self):
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x):
        return self.inner(x)


def share(step, rows=6, total=None):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 3, generator=generator)
    y = torch.randint(2, (rows,), generator=generator)
    return Share([((x, y), rows)], rows, total or rows, 0, step, y.numpy())


def opened(model, level="math", shards=1, telling=EACH_STEP, world=None, **options):
    settings = {"loss": nn.CrossEntropyLoss()} | options
    job = kway.Job(model=model, data=(torch.zeros(6, 3), torch.zeros(6)), batch_size=6, **settings)
    layout = {} if world is None else {"data": world.size}
    engine = Engine(job, model, layout, world or World(), level, 6, shards, telling=telling)
    recorder = Double(engine.model, engine.optimizer)
    return engine, GraphedStep(engine._step, recorder), recorder


def after(graphed, steps, change):
    """Take some steps, change something, take some more; return the recordings' replays."""
    for step in range(steps):
        graphed.run(share(step), step)
    change()
    for step in range(steps, 2 * steps):
        graphed.run(share(step), step)


class Scaled(Net):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x):
        return self.inner(x * self.mask) * self.scale
