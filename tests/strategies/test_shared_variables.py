"""Strategy threads refuses a model whose hooks hand something to its forward pass through what a process has once."""

import pytest
import torch
from torch import nn

import kway
from kway.strategies.shared_variables import shared_variable

FOUND: dict = {}
CALLS: list = []
SETTINGS = {"scale": 2.0}
LAST = None


def keep(module, args, out):
    FOUND["x"] = out


def rebind(module, args, out):
    global LAST
    LAST = out


def put(out):
    FOUND.update(x=out)


def take():
    return FOUND["x"]


class Plain(nn.Module):
    def __init__(self, hook):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.layer.register_forward_hook(hook)

    def forward(self, x):
        CALLS.append(len(x))
        return self.layer(x) * SETTINGS["scale"]


class Reads(Plain):
    def forward(self, x):
        return self.layer(x) + FOUND["x"]


class Asks(Plain):
    def forward(self, x):
        return self.layer(x) + take()


class ReadsName(Plain):
    def forward(self, x):
        return self.layer(x) + LAST


def held(hook):
    model = Plain(hook)
    model.take = lambda: FOUND["x"]
    return model


def around():
    found = {}

    class Around(Plain):
        def forward(self, x):
            return self.layer(x) + found["x"]

    return Around(lambda module, args, out: found.__setitem__("x", out))


def closing_over():
    found = {}
    model = Plain(lambda module, args, out: found.__setitem__("x", out))
    model.take = lambda: found["x"]
    return model


def test_a_variable_that_a_hook_writes_and_a_forward_pass_reads_is_named():
    for make, name in (
        (lambda: Reads(keep), "FOUND"),
        (lambda: Asks(lambda module, args, out: put(out)), "FOUND"),
        (lambda: held(lambda module, args, out: FOUND.__setitem__("x", out)), "FOUND"),
        (lambda: ReadsName(rebind), "LAST"),
        (around, "found"),
    ):
        said = shared_variable(make())
        assert said is not None, name
        assert f"of layer 'layer' writes to the variable {name!r}" in said


def test_what_only_collects_or_is_only_read_or_closed_over_is_not():
    for model in (
        Plain(keep),
        Plain(lambda module, args, out: CALLS.append(len(out))),
        Plain(lambda module, args, out: out * SETTINGS["scale"]),
        ReadsName(keep),
        Reads(rebind),
        closing_over(),
    ):
        assert shared_variable(model) is None


def job():
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(24, 6, generator=draw), torch.randn(24, 3, generator=draw)
    return kway.Job(Reads(keep), nn.MSELoss(), torch.optim.SGD, data, batch_size=16)


def test_threads_refuse_it():
    where = {"devices": "cpu:2", "strategy": "threads"}
    with pytest.raises(kway.RefusedError, match=r"threads=2 cannot keep .* variable 'FOUND'"):
        kway.train(job(), epochs=1, **where)
    for evaluate in (kway.evaluate, kway.predict):
        with pytest.raises(kway.RefusedError, match="variable 'FOUND'"):
            evaluate(job(), **where)
