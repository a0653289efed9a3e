"""What a step changes is found however its code comes by it."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import kway
from kway.strategies.shared_state import Reach

LAST = None
# A package of a user's, with a module in it.
PACK = ModuleType("pack")
PACK.part = ModuleType("pack.part")
PACK.part.kept = None


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)


class OfPackage(Plain):
    def forward(self, x):
        PACK.part.kept = self.layer(x)
        return PACK.part.kept.relu()


class Imports(Plain):
    def forward(self, x):
        import pack.part as there

        there.kept = self.layer(x)
        return there.kept.relu()


class ByText(Plain):
    def forward(self, x):
        setattr(PACK.part, "kept", self.layer(x))  # noqa: B010
        return PACK.part.kept.relu()


class InGlobals(Plain):
    def forward(self, x):
        globals()["LAST"] = self.layer(x)
        return globals()["LAST"].relu()


def helper(value):
    helper.kept = value
    return helper.kept.relu()


class InFunction(Plain):
    def forward(self, x):
        return helper(self.layer(x))


class Meta(type):
    kept: dict = {}


class OfMeta(Plain, metaclass=Meta):
    def forward(self, x):
        type(type(self)).kept["x"] = self.layer(x)
        return type(type(self)).kept["x"].relu()


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pack", PACK)
    monkeypatch.setitem(sys.modules, "pack.part", PACK.part)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Plain, None),
        (OfPackage, "the variable 'kept' of pack.part"),
        (Imports, "the variable 'kept' of pack.part"),
        (ByText, "the variable 'kept' of pack.part"),
        (InGlobals, "the global variable 'LAST'"),
        (InFunction, "attribute 'kept' of helper"),
        (OfMeta, "attribute 'kept' of class Meta"),
    ],
)
def test_what_a_pass_changes_is_named_however_its_code_comes_by_it(make, found):
    model, x = make(), torch.randn(4, 6)
    model(x)
    held = Reach(model, kway.Job(model, nn.MSELoss(), torch.optim.SGD, (x, x[:, :3])))
    with held.watched(held.keys) as changes:
        model(x)
    assert changes.found == (found and f"a step changes {found}, which all replicas of this process share")
