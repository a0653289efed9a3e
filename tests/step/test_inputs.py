"""How batches of all kinds reach model and loss."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from kway.errors import UsageError
from kway.step.inputs import caller, move, splitter

A, B, C = torch.ones(2), torch.zeros(2), torch.tensor([1, 0])
Pair = namedtuple("Pair", "image label")
CPU = torch.device("cpu")


class Encoding(dict):
    """Like what tokenizers return: a dict that also has attributes."""


@dataclass
class Graph:
    nodes: torch.Tensor
    edges: torch.Tensor
    size: int
    label: torch.Tensor


def same(found, args, kwargs, target):
    assert len(found[0]) == len(args)
    assert all(a is b for a, b in zip(found[0], args, strict=True))
    assert list(found[1]) == list(kwargs)
    assert all(found[1][name] is kwargs[name] for name in kwargs)
    assert found[2] is target


@pytest.mark.parametrize(
    ("batch", "args", "kwargs", "target"),
    [
        ((A, C), (A,), {}, C),
        ([A, C], (A,), {}, C),
        ((A, B, C), (A, B), {}, C),
        (Pair(A, C), (A,), {}, C),
        ({"x": A, "target": C}, (), {"x": A}, C),
        ({"label": C, "x": A, "y": B}, (), {"x": A, "y": B}, C),
        (Encoding(input_ids=A, attention_mask=B, labels=C), (), {"input_ids": A, "attention_mask": B}, C),
        (OrderedDict(labels=B, target=C), (), {"labels": B}, C),
    ],
)
def test_conventions(batch, args, kwargs, target):
    same(splitter(None, None, True)(batch), args, kwargs, target)


@pytest.mark.parametrize(
    ("inputs", "target", "batch", "args", "kwargs", "goal"),
    [
        (None, "y", {"x": A, "z": B, "y": C}, (), {"x": A, "z": B}, C),
        ("x", "y", {"x": A, "z": B, "y": C}, (A,), {}, C),
        (["x", "z"], "y", {"x": A, "z": B, "y": C, "w": A}, (), {"x": A, "z": B}, C),
        (
            lambda batch: (batch["z"], batch["x"]),
            lambda batch: batch["y"],
            {"x": A, "z": B, "y": C},
            (B, A),
            {},
            C,
        ),
        (lambda batch: {"image": batch[0]}, None, (A, C), (), {"image": A}, C),
        (0, 2, (A, B, C), (A,), {}, C),
        ([1, 0], 2, (A, B, C), (B, A), {}, C),
        (None, 0, (C, A, B), (A, B), {}, C),
        (None, -2, (A, C, B), (A, B), {}, C),
        (["nodes", "edges"], "label", Graph(A, B, 2, C), (A, B), {}, C),
        (None, lambda batch: batch[-1], (A, B, C), (A, B), {}, C),
    ],
)
def test_inputs_and_target_override(inputs, target, batch, args, kwargs, goal):
    same(splitter(inputs, target, True)(batch), args, kwargs, goal)


def test_a_target_may_be_several():
    _, _, goal = splitter("x", ["y", "z"], True)({"x": A, "y": B, "z": C})
    assert goal["y"] is B
    assert goal["z"] is C


def test_without_a_loss_the_model_gets_everything():
    same(splitter(None, None, False)((A, B, C)), (A, B, C), {}, None)
    same(splitter(None, None, False)({"x": A, "labels": C}), (), {"x": A, "labels": C}, None)
    same(splitter(None, None, False)(A), (A,), {}, None)


@pytest.mark.parametrize(
    ("inputs", "target", "batch", "named"),
    [
        (None, None, {"x": A, "y": B}, "x, y"),
        (None, None, A, "Tensor"),
        (None, None, (A,), "tuple"),
        (None, "y", {"x": A, "z": B}, "'y'"),
        ("w", "x", {"x": A}, "'w'"),
        (0, 5, (A, B), "5"),
        ("shape_of", "label", Graph(A, B, 2, C), "shape_of"),
    ],
)
def test_a_part_that_is_not_there_is_an_error_that_names_it(inputs, target, batch, named):
    with pytest.raises(UsageError, match=named):
        splitter(inputs, target, True)(batch)


@pytest.mark.parametrize(
    ("inputs", "target", "batch", "args", "kwargs"),
    [
        (None, None, A, (A,), {}),
        (None, None, (A,), (A,), {}),
        (None, None, (A, C), (A,), {}),
        (None, None, (A, B, C), (A, B), {}),
        (None, None, {"x": A, "y": B}, (), {"x": A, "y": B}),
        (None, None, {"x": A, "labels": C}, (), {"x": A}),
        (None, None, OrderedDict(labels=B, target=C), (), {"labels": B}),
        (None, "y", {"x": A, "y": C}, (), {"x": A}),
        (None, "y", {"x": A, "z": B}, (), {"x": A, "z": B}),
        (None, ["y", "z"], {"x": A, "z": B}, (), {"x": A}),
        (None, 2, (A, B, C), (A, B), {}),
        (None, 2, (A, B), (A, B), {}),
        (None, 0, (C, A), (A,), {}),
        (None, [1, 2], (A, C), (A,), {}),
        (None, lambda batch: batch[-1], A, (A,), {}),
        (None, lambda batch: batch[-1], (A, C), (A,), {}),
        ("x", "y", {"x": A, "z": B}, (A,), {}),
        ("x", "y", A, (A,), {}),
        (0, 1, A, (A,), {}),
        (0, 1, (A,), (A,), {}),
        (lambda batch: batch["x"], "y", {"x": A}, (A,), {}),
        (["nodes", "edges"], "label", Graph(A, B, 2, C), (A, B), {}),
    ],
)
def test_prediction_takes_what_is_no_target(inputs, target, batch, args, kwargs):
    same((*caller(inputs, target, True)(batch), None), args, kwargs, None)


def test_prediction_by_a_model_that_has_its_own_loss_takes_all():
    same((*caller(None, None, False)((A, B, C)), None), (A, B, C), {}, None)
    same((*caller(None, None, False)({"x": A, "labels": C}), None), (), {"x": A, "labels": C}, None)


def test_prediction_refuses_what_it_cannot_tell():
    with pytest.raises(UsageError, match="'w'"):
        caller("w", None, True)({"x": A})
    with pytest.raises(UsageError, match="pass inputs= as well"):
        caller(None, lambda batch: batch["y"], True)({"x": A, "y": C})


def test_move_keeps_the_structure_and_casts_real_tensors_only():
    wave = torch.ones(1, dtype=torch.complex64)
    batch = (
        A, [B, "text", 3], Pair(A, C), Graph(A, B, 2, C), Encoding(x=A), {"n": None, "b": C > 0}, wave,
    )  # fmt: skip
    moved = move(batch, CPU, torch.float64)
    assert moved[0].dtype == torch.float64
    assert moved[1][0].dtype == torch.float64
    assert moved[1][1:] == ["text", 3]
    assert type(moved[2]) is Pair
    assert moved[2].label.dtype == torch.int64
    assert type(moved[3]) is Graph
    assert (moved[3].nodes.dtype, moved[3].size) == (torch.float64, 2)
    assert type(moved[4]) is Encoding
    assert moved[4]["x"].dtype == torch.float64
    assert moved[5]["n"] is None
    assert moved[5]["b"].dtype == torch.bool
    assert moved[6].dtype == torch.complex128
    assert batch[3].nodes.dtype == torch.float32
    assert move(batch, CPU)[0].dtype == torch.float32
