"""Gathers that a compiler takes whole: their names in torch's registry, and the shape that it is told."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kway.comm.group import Group
from kway.comm.operation import GatherOperation


def name_of(operation):
    return operation.gather.name()


def test_two_operations_have_names_of_their_own_and_give_them_back():
    first, second = (GatherOperation(Group(0, 2)) for _ in range(2))
    names = [name_of(first), name_of(second)]
    assert len({*names}) == 2
    first.close()
    third = GatherOperation(Group(0, 2))
    assert name_of(third) == names[0]
    second.close()
    third.close()


def test_what_is_wrong_with_each_name_is_no_reason_to_look_for_another(monkeypatch):
    tried = []

    def define(self, schema):
        tried.append(schema)
        raise RuntimeError("unknown type specifier")

    monkeypatch.setattr(torch.library.Library, "define", define)
    with pytest.raises(RuntimeError, match="specifier"):
        GatherOperation(Group(0, 2))
    assert len(tried) == 1


def test_a_compiler_is_told_the_shape_that_ranks_give():
    operation = GatherOperation(Group(0, 3))
    with FakeTensorMode():
        rows = operation.gather(torch.zeros(5, dtype=torch.float64), torch.zeros(1), "layer")
    operation.close()
    assert (rows.shape, rows.dtype) == ((3, 5), torch.float64)
