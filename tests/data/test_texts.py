"""Rows of tokens, and the text that comes with Python."""

import numpy as np
import pytest
import torch

from kway.data.arrays import leaves
from kway.data.sources import load
from kway.data.texts import Windows
from kway.errors import DataError
from kway.training.subject import data_text

TEXT = torch.arange(23, dtype=torch.uint8)


def test_rows_follow_each_other_and_each_token_has_its_follower():
    windows = Windows("text", TEXT, 5, 23)
    assert len(windows) == 4
    tokens, following = windows.take(np.array([3, 0]))
    assert tokens.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert following.tolist() == [[16, 17, 18, 19, 20], [1, 2, 3, 4, 5]]
    assert tokens.dtype == following.dtype == torch.int64
    one = windows[1]
    assert (one[0].tolist(), one[1].tolist()) == ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10])


def test_what_is_kept_on_a_device_makes_the_same_batch():
    windows = Windows("text", TEXT, 5, 23)
    rows = windows.rows()
    found = rows.made(next(iter(leaves(rows.arrays)))[torch.tensor([2, 1])])
    for one, other in zip(found, windows.take(np.array([2, 1])), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "length", "classes", "match"),
    [
        (TEXT.float(), 5, 23, "tokens of type torch.float32"),
        (TEXT.view(1, -1), 5, 23, r"shape \(1, 23\)"),
        (TEXT, 23, 23, "23 tokens in rows of 23"),
        (TEXT, 0, 23, "23 tokens in rows of 0"),
        (TEXT, 5, 22, "tokens from 0 to 22: tokens from 0 to 21"),
        (TEXT.to(torch.int32) - 1, 5, 23, "tokens from -1 to 21"),
    ],
)
def test_what_is_no_text_is_said(tokens, length, classes, match):
    with pytest.raises(DataError, match=match):
        Windows("text", tokens, length, classes)


def test_the_text_of_python():
    source = load("text")
    assert (source.shape, source.classes) == ((128,), 256)
    assert len(source.train) > 2_000
    assert 0.03 < len(source.validation) / len(source.train) < 0.3
    tokens, _ = source.train.take(np.arange(len(source.train)))
    read = bytes(tokens.flatten().tolist()).decode(errors="replace")
    assert "statement" in read
    held, _ = source.validation.take(np.arange(20))
    assert bytes(held.flatten().tolist()).decode(errors="replace")[200:400] not in read
    assert "Python" in source.notices[0]


def test_records_name_it():
    assert data_text(load("text").train) == "text"
    assert data_text(load("synthetic").validation) == "synthetic"
