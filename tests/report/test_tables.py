import pytest

from kway.report.tables import table


def test_text_left_and_numbers_right() -> None:
    assert table(["name", "step"], [["single", 1.5], ["data=2", 12]]) == (
        "name    step\n"  # both columns are as wide as their widest cell
        "single   1.5\n"
        "data=2    12"
    )


def test_units_and_groups_read_as_numbers() -> None:
    lines = table(["memory"], [["1,024 MiB"], ["8 GiB"], ["nan"]]).split("\n")
    assert lines == ["   memory", "1,024 MiB", "    8 GiB", "      nan"]


def test_a_word_in_a_column_keeps_it_left() -> None:
    assert table(["n"], [[100], ["all"]]).split("\n") == ["n", "100", "all"]


def test_none_is_a_dash_and_does_not_change_the_alignment() -> None:
    assert table(["ulps"], [[None], [3]]).split("\n") == ["ulps", "   -", "   3"]


def test_line_breaks_in_a_cell_do_not_break_the_table() -> None:
    assert table(["reason", "x"], [["one\ntwo", 1]]).split("\n")[1] == "one two  1"


def test_no_rows_is_the_headings_alone() -> None:
    assert table(["a", "b"], []) == "a  b"


def test_a_row_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 cells under 2 headings"):
        table(["a", "b"], [["only"]])
