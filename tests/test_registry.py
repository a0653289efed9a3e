import pytest

from kway.registry import closest


@pytest.mark.parametrize(
    ("name", "names", "found"),
    [
        ("AdamW", ["adam", "adamw"], "adamw"),
        ("net", ["Net", "Nets"], "Net"),
        ("lnet", ["LeNet", "rnn"], "LeNet"),
        ("x", ["LeNet"], None),
    ],
)
def test_the_closest_name_is_found_in_any_letters(name, names, found):
    assert closest(name, names) == found
