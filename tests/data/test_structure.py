"""Walks over what a batch may be: dataclasses keep what they computed, whatever happens to their tensors."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

import pytest
import torch

from kway.data.digest import digest_of
from kway.data.structure import mapped, tensors


@dataclass
class Computed:
    """Changes one field, computes another, and keeps something that is none."""

    x: torch.Tensor
    twice: list[torch.Tensor] = field(init=False)
    never: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.x = self.x / 2
        self.twice = [2 * self.x]
        self.positive = self.x > 0


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: InitVar[float]
    half: torch.Tensor = field(init=False)

    def __post_init__(self, scale):
        object.__setattr__(self, "x", self.x * scale)
        object.__setattr__(self, "half", self.x / 2)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    half: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "half", self.x / 2)


@pytest.mark.parametrize(
    "made", [Computed(torch.ones(3)), Frozen(torch.ones(3), 4.0), Slotted(torch.ones(3))]
)
def test_a_dataclass_whose_tensors_are_copied_computes_nothing_again(made):
    before = [tensor.clone() for tensor in tensors(made)]
    found = mapped(made, torch.Tensor.clone)
    assert type(found) is type(made)
    assert len(before) == (3 if isinstance(made, Computed) else 2)
    for own, copied, value in zip(tensors(made), tensors(found), before, strict=True):
        assert copied is not own
        assert torch.equal(copied, value)
        assert torch.equal(own, value)


def test_what_a_dataclass_computes_moves_with_the_rest():
    found = mapped(Computed(torch.ones(3)), lambda tensor: tensor.to("meta"))
    assert {tensor.device.type for tensor in (found.x, *found.twice, found.positive)} == {"meta"}
    assert not hasattr(found, "never")


def test_a_field_that_is_not_there_yet_is_no_part_of_a_digest():
    assert digest_of(Computed(torch.ones(3))) == digest_of(Computed(torch.ones(3)))
    assert digest_of(Computed(torch.ones(3))) != digest_of(Computed(torch.zeros(3)))


@dataclass
class Node:
    x: torch.Tensor
    inner: list = field(default_factory=list)
    above: object = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        for node in self.inner:
            node.above = self


def test_dataclasses_may_refer_to_each_other():
    tree = Node(torch.ones(2), [Node(torch.zeros(2))])
    made = mapped(tree, lambda tensor: tensor + 1)
    assert made is not tree
    assert made.inner[0].above is made
    assert [tensor.tolist() for tensor in tensors(made)] == [[2, 2], [1, 1]]


class Views(Mapping):
    """Makes what it holds when it is asked for it."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, key):
        value = self.held[key]
        return value if isinstance(value, Node) else Node(value)

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_dataclasses_that_are_made_when_they_are_read():
    views = Views({number: torch.tensor(float(number)) for number in range(50)})
    assert [float(tensor) for tensor in tensors(views)] == [*range(50)]
    assert [float(tensor) for tensor in tensors(mapped(views, torch.neg))] == [
        -number for number in range(50)
    ]
