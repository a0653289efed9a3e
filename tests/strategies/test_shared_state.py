"""Strategy threads refuses a step that changes what all replicas of a process share, wherever that lies."""

import functools
import itertools
import queue
from array import array
from collections import defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import kway

FOUND: dict = {}
STACK: list = []
LAST = None
SETTINGS = {"scale": 2.0}
SIZES: dict = {}
MADE_ONCE: dict = {}
TABLE = torch.zeros(3)
ROWS = np.zeros(3)
CELLS = array("d", [0.0])
NUMBERS = itertools.count()
TURNS = itertools.cycle([1.0, 2.0])
BOX = queue.Queue()
MADE = torch.Generator().manual_seed(1)


def keep(module, args, out):
    FOUND["x"] = out


def rebind(module, args, out):
    global LAST
    LAST = out


class Plain(nn.Module):
    def __init__(self, hook=None):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        if hook is not None:
            self.layer.register_forward_hook(hook)

    def forward(self, x):
        return self.layer(x) * SETTINGS["scale"]


class OfClass(Plain):
    kept: dict = {}

    def forward(self, x):
        self.kept["x"] = self.layer(x)
        return self.kept["x"].relu()


class Counts(Plain):
    calls = 0

    def forward(self, x):
        Counts.calls += 1
        return self.layer(x) * Counts.calls


class Default(Plain):
    def forward(self, x, memory=[]):  # noqa: B006
        memory.append(self.layer(x))
        out = memory[0].relu()
        memory.clear()
        return out


class Stacked(Plain):
    def forward(self, x):
        STACK.append(self.layer(x))
        return STACK[-1].relu() + STACK.pop()


class Slots:
    __slots__ = ("seen",)


SLOTS = Slots()


class Slotted(Plain):
    def forward(self, x):
        SLOTS.seen = self.layer(x)
        return SLOTS.seen


class Writes(Plain):
    def forward(self, x):
        TABLE.add_(1)
        return self.layer(x)


class WritesRows(Plain):
    def forward(self, x):
        ROWS[0] += 1
        return self.layer(x)


class Numbered(Plain):
    def forward(self, x):
        return self.layer(x) * next(NUMBERS)


class TakesTurns(Plain):
    def forward(self, x):
        return self.layer(x) * next(TURNS)


class Queues(Plain):
    def forward(self, x):
        BOX.put(self.layer(x))
        return BOX.get().relu()


class Draws(Plain):
    def forward(self, x):
        return self.layer(x) + torch.rand(3, generator=MADE)


def decorated(forward):
    seen = {}

    @functools.wraps(forward)
    def around(self, x):
        seen["x"] = x
        return forward(self, seen["x"])

    return around


class Decorated(Plain):
    @decorated
    def forward(self, x):
        return self.layer(x)


@functools.cache
def cached(x):
    return x * 2


class Caches(Plain):
    def forward(self, x):
        return self.layer(cached(x))


def rightly(output, target):
    global LAST
    LAST = output - target
    return LAST.square().mean(dim=1)


class Scratch(torch.optim.SGD):
    kept = None

    def step(self, closure=None):
        Scratch.kept = [p.grad for group in self.param_groups for p in group["params"]]
        return super().step(closure)


def fading(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + next(NUMBERS)))


class ByData(Plain):
    def forward(self, x):
        TABLE.data += 1
        return self.layer(x) + TABLE


class ByArray(Plain):
    def forward(self, x):
        CELLS[0] += 1
        return self.layer(x) * CELLS[0]


class Handing(nn.Module):
    """A loss that hands something to itself through a class."""

    kept = deque()

    def forward(self, output, target):
        self.kept.append(output)
        gap = self.kept[-1] - target
        self.kept.clear()
        return gap.square().mean()


def job(model, loss=None, **more):
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(24, 6, generator=draw), torch.randn(24, 3, generator=draw)
    more = {"optimizer": torch.optim.SGD, **more}
    return kway.Job(model, loss or nn.MSELoss(), data=data, batch_size=8, seed=0, **more)


def threads(model, loss=None, **more):
    return kway.train(job(model, loss, **more), epochs=1, devices="cpu:2", strategy="threads", echo=False)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Plain(keep), "global variable 'FOUND'"),
        (lambda: Plain(rebind), "global variable 'LAST'"),
        (OfClass, "attribute 'kept' of class OfClass"),
        (Counts, "attribute 'calls' of class Counts"),
        (Default, "a default argument of Default.forward"),
        (Stacked, "global variable 'STACK'"),
        (Slotted, "global variable 'SLOTS'"),
        (Writes, "global variable 'TABLE'"),
        (WritesRows, "global variable 'ROWS'"),
        (Numbered, "global variable 'NUMBERS'"),
        (TakesTurns, "global variable 'TURNS'"),
        (Queues, "global variable 'BOX'"),
        (Draws, "global variable 'MADE'"),
        (Decorated, "variable 'seen' that Decorated.forward closes over"),
        (Caches, "global variable 'cached'"),
        (ByData, "global variable 'TABLE'"),
        (ByArray, "global variable 'CELLS'"),
    ],
    ids=lambda given: getattr(given, "__name__", "")[:9],
)
def test_what_a_step_changes_for_all_is_named(make, named):
    with pytest.raises(kway.RefusedError, match="which all replicas of this process share") as refused:
        threads(make())
    assert named in str(refused.value)


def test_so_is_what_a_loss_changes():
    with pytest.raises(kway.RefusedError, match="attribute 'kept' of class Handing"):
        threads(Plain(), Handing())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"metrics": {"gap": rightly}}, "global variable 'LAST'"),
        ({"optimizer": Scratch}, "attribute 'kept' of class Scratch"),
        ({"schedule": fading}, "global variable 'NUMBERS'"),
    ],
    ids=["metric", "optimizer", "schedule"],
)
def test_and_what_metrics_optimizer_and_schedule_change(more, named):
    with pytest.raises(kway.RefusedError, match="which all replicas of this process share") as refused:
        threads(Plain(), **more)
    assert named in str(refused.value)


def test_and_a_hook_of_all_modules():
    hook = torch.nn.modules.module.register_module_forward_hook(keep)
    try:
        with pytest.raises(kway.RefusedError, match="global variable 'FOUND'"):
            threads(Plain())
    finally:
        hook.remove()


class Grouped(Plain):
    """Its first layer is known to an object that copy.deepcopy gives to all."""

    def __init__(self):
        super().__init__()
        self.known = Shared(self.layer)

    def forward(self, x):
        return self.known.layer(x)


class Shared:
    def __init__(self, layer):
        self.layer = layer

    def __deepcopy__(self, memo):
        return self


def test_a_layer_of_another_replica_is_named():
    with pytest.raises(
        kway.RefusedError, match="attribute 'layer' of Shared leads to a layer of another replica"
    ):
        threads(Grouped())


class Remembers(Plain):
    """A cache of its class has each replica among its keys."""

    @functools.cache  # noqa: B019
    def scale(self, rows):
        return 2.0

    def forward(self, x):
        return self.layer(x) * self.scale(6)


def test_so_is_one_that_the_first_step_makes_known():
    with pytest.raises(
        kway.RefusedError, match="attribute 'scale' of class Remembers leads to a layer of another replica"
    ):
        threads(Remembers())


class Registered(Plain):
    """Notes what was made, which no step reads."""

    def __init__(self):
        super().__init__()
        MADE_ONCE["layer"] = self.layer


def test_what_only_the_making_of_a_layer_writes_is_none():
    threads(Registered())


class OnlyReads(Plain):
    """Fills a cache once, reads what is global, and keeps what it changes to itself."""

    def __init__(self):
        super().__init__(self.note)
        self.own = defaultdict(list)

    @staticmethod
    def note(module, args, out):
        module.last = out.detach()

    def forward(self, x):
        if x.shape not in SIZES:
            SIZES[x.shape] = torch.ones(3)
        self.own["x"].append(len(x))
        return super().forward(x) * SIZES[x.shape]


def test_what_is_read_filled_once_or_a_replicas_own_goes_on():
    losses = []
    for devices, strategy in (("cpu:1", "single"), ("cpu:2", "threads")):
        torch.manual_seed(0)
        run = kway.train(
            replace(job(OnlyReads), precision="fp64"),
            epochs=2, devices=devices, strategy=strategy, echo=False,
        )  # fmt: skip
        losses.append([epoch["train_loss"] for epoch in run.epochs])
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)


def test_a_profile_says_it_for_plans():
    found = kway.profile(job(OfClass), devices="cpu:2", seconds=2)
    assert found.not_in_threads == (
        "a step changes attribute 'kept' of class OfClass, which all replicas of this process share"
    )
    assert kway.profile(job(OnlyReads), devices="cpu:2", seconds=2).not_in_threads is None
