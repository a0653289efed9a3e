"""Forms of plain data, and what is said of data of another form."""

import math

import pytest

from kway.forms import AtLeast, Maybe, OneOf, wrong

ROW = {"name": str, "seconds": AtLeast(0), "notes": Maybe(list[str])}


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (1, float), (1.5, float), (True, bool), ("", str), (None, str | None), ([], list[int]), ({}, dict[str, int]),
        ({"a": [1, "x"]}, {"a": list[int | str]}), ({"a": 1, "more": object()}, {"a": int}), (object(), object),
        ({"name": "x", "seconds": 0}, ROW), (None, (ROW, None)), ([{"name": "x", "seconds": 1}], [ROW]),
        ({"x": 1, "y": 2}, {str: AtLeast(1, int)}), ("up", OneOf(("up", "down"))),
    ],
)  # fmt: skip
def test_what_is_of_a_form_is_not_wrong(value, form):
    assert wrong(value, form) == ""


@pytest.mark.parametrize(
    ("value", "form", "said"),
    [
        (True, int, "it is True, not a whole number"),
        (1, bool, "it is 1, not true or false"),
        (1.0, int, "it is 1.0, not a whole number"),
        (math.nan, float, "it is nan, not a finite number up to 1e+30"),
        (10**400, int, "it is 1e+400 or more, not a finite number up to 1e+30"),
        (5, str | None, "it is 5, not a text or nothing"),
        ([1], str, "it is a list, not a text"),
        (-1, AtLeast(0), "it is -1, not a number of at least 0"),
        (0, AtLeast(0, above=True), "it is 0, not a number above 0"),
        ("left", OneOf(("up", "down")), "it is 'left', not one of up, down"),
        ({}, ROW, "name is missing"),
        ({"name": "x", "seconds": 1, "notes": [5]}, ROW, "notes[0] is 5, not a text"),
        ([{"name": "x"}], [ROW], "it[0]: seconds is missing"),
        ({"rows": [{"name": 1}]}, {"rows": [ROW]}, "rows[0]: name is 1, not a text"),
        ({"a": {"b": {"c": None}}}, {"a": {"b": {"c": int}}}, "a.b: c is None, not a whole number"),
        ({"a": {"b": 1}}, {"a": {str: str}}, "a: b is 1, not a text"),
        ({"a": {5: 1}}, {"a": dict[str, int]}, "a: a name in it is 5, not a text"),
        # Of several forms that a table may have, what is wrong with the first.
        ({"a": {"name": "x"}}, {"a": (ROW, None)}, "a: seconds is missing"),
        ({"a": 5}, {"a": (ROW, None)}, "a is 5, not a table of fields or nothing"),
    ],
)
def test_what_is_not_is_named_with_its_place(value, form, said):
    assert wrong(value, form) == said
