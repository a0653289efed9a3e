"""Predictions in dataclasses: put together as they are, and nothing in them computed a second time."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import kway
from kway.data.structure import mapped
from kway.jobs.predictions import merged

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


@dataclass
class Said:
    value: torch.Tensor
    more: dict[str, torch.Tensor]
    none: None = None


class Saying(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Said(x * 2 * self.scale, {"first": x[:, 0]})


@pytest.mark.parametrize("size", [1, 2])
def test_predictions_in_a_dataclass_come_back_in_one(spread, size):
    x = torch.arange(14.0).reshape(7, 2)
    job = kway.Job(model=Saying, loss=None, optimizer=torch.optim.SGD, data=x, batch_size=3)
    said = kway.predict(job, Saying(), data=x, devices=f"cpu:{size}")
    assert isinstance(said, Said)
    assert torch.equal(said.value, x * 2)
    assert torch.equal(said.more["first"], x[:, 0])
    assert said.none is None


@dataclass
class Computed:
    """Computes several things of its fields, and changes one of them."""

    logits: torch.Tensor
    best: torch.Tensor = field(init=False)
    classes: int = field(init=False)
    about: dict[str, object] = field(init=False)

    def __post_init__(self):
        self.logits = 2 * self.logits
        self.best = self.logits.argmax(1)
        self.classes = self.logits.shape[1]
        self.about = {"kind": "twice", "temperature": torch.tensor(2.0), "first": self.logits[:, 0]}
        self.last = self.logits[:, -1]


class Computing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return Computed(self.layer(x))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("copied", [False, True])
def test_what_a_dataclass_computes_comes_back_as_it_was_computed(spread, monkeypatch, size, copied):
    if copied:
        # As on the way from another device.
        monkeypatch.setattr(
            "kway.strategies.evaluation.move", lambda value, _: mapped(value, torch.Tensor.clone)
        )
    model = Computing()
    job = kway.Job(model=model, loss=None, optimizer=torch.optim.SGD, data=X, batch_size=2)
    found = kway.predict(job, model, devices=f"cpu:{size}")
    with torch.no_grad():
        right = model(X)
    torch.testing.assert_close(found.logits, right.logits)
    torch.testing.assert_close(found.last, right.last)
    torch.testing.assert_close(found.about["first"], right.about["first"])
    assert torch.equal(found.best, right.best)
    assert (found.classes, found.about["kind"], found.about["temperature"]) == (2, "twice", 2.0)


@dataclass
class Counted:
    rows: torch.Tensor
    made: object = field(init=False)


def pieces(*made):
    """Give predictions of two samples each, with what was computed for them."""
    for place, value in enumerate(made):
        one = Counted(torch.ones(2))
        if value is not None:
            one.made = value
        yield [2 * place, 2 * place + 1], {"out": one}


@pytest.mark.parametrize(
    "made",
    [
        (1, 2),
        ("a", "b"),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.ones(2, 3), torch.ones(2, 4)),
        (torch.ones(2), 1),
        ([1], [2]),
    ],
)
def test_what_is_no_row_and_differs_between_batches_is_named(made):
    with pytest.raises(kway.UsageError, match=r"the output\['out'\]\.made.* differs between batches"):
        merged(list(pieces(*made)))


@pytest.mark.parametrize(
    "made", [(1, None), (None, torch.ones(2)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ([1], 1)]
)
def test_what_only_some_batches_have_is_named(made):
    with pytest.raises(kway.UsageError, match=r"the output\['out'\].* holds other parts"):
        merged(list(pieces(*made)))


def test_what_is_equal_in_all_batches_stays():
    statistic = torch.tensor([1.0, 2.0, 3.0])
    found = merged(list(pieces(statistic, statistic.clone())))["out"]
    assert torch.equal(found.made, statistic)
    assert len(found.rows) == 4
    assert merged(list(pieces("a", "a")))["out"].made == "a"
    assert not hasattr(merged(list(pieces(None, None)))["out"], "made")


def test_what_the_model_itself_returns_must_be_rows():
    with pytest.raises(kway.UsageError, match="a prediction of type int"):
        merged([([0], {"a": torch.ones(1), "n": 3}), ([1], {"a": torch.ones(1), "n": 3})])
    with pytest.raises(kway.UsageError, match="holds other parts"):
        merged([([0], {"a": torch.ones(1), "n": None}), ([1], {"a": torch.ones(1)})])


class Gives(nn.Linear):
    """Gives its output as ``given`` makes it."""

    def __init__(self, given):
        super().__init__(3, 2)
        self.given = given

    def forward(self, x):
        return self.given(super().forward(x))


@pytest.mark.parametrize("batch", [2, 5], ids=["several", "one"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda out: out.to_sparse(), r"output is a Tensor .*sparse_coo.*\.to_dense"),
        (lambda out: {"a": out.to_sparse_csr()}, r"output\['a'\] is a Tensor .*sparse_csr.*\.to_dense"),
        (
            lambda out: torch.nested.nested_tensor([*out], layout=torch.jagged),
            r"a NestedTensor .*nested, layout torch.jagged.*\.to_padded_tensor",
        ),
    ],
    ids=["coo", "csr", "jagged"],
)
def test_outputs_that_are_not_dense_are_refused(given, said, batch):
    job = kway.Job(model=Gives(given), loss=None, optimizer=torch.optim.SGD, data=X, batch_size=batch)
    with pytest.raises(kway.UsageError, match=said):
        kway.predict(job, data=X, devices="cpu:1")
