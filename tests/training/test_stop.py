import math

import pytest

from kway.training.stop import EarlyStop, improved

NAN = math.nan


@pytest.mark.parametrize(
    ("name", "value", "best", "is_better"),
    [
        ("validation_loss", 1.0, None, True),
        ("validation_loss", NAN, None, True),
        ("validation_loss", 0.5, 1.0, True),
        ("validation_loss", 1.0, 1.0, False),
        ("scores/log_loss", 2.0, 1.0, False),
        ("accuracy", 2.0, 1.0, True),
        ("accuracy", 1.0, 1.0, False),
        ("accuracy", 0.5, 1.0, False),
        ("accuracy", NAN, 1.0, False),
        ("accuracy", 0.0, NAN, True),
        ("validation_loss", math.inf, NAN, True),
        ("validation_loss", NAN, NAN, False),
    ],
)
def test_what_is_better(name, value, best, is_better):
    assert improved(name, value, best) == is_better


@pytest.mark.parametrize(
    ("patience", "values", "ends_at"),
    [
        (1, [3.0, 2.0, 2.0], 2),
        (1, [3.0, 4.0], 1),
        (2, [3.0, 4.0, 2.0, 2.5, 2.1], 4),
        (3, [3.0, 4.0, 4.0, 2.9, 3.0, 3.0, 2.8], None),
        (2, [NAN, NAN, NAN], 2),
        (2, [NAN, 5.0, 6.0, NAN], 3),
    ],
)
def test_patience_counts_validations_since_the_best(patience, values, ends_at):
    stop = EarlyStop("validation_loss", patience)
    said = [stop.judge(value) for value in values]
    assert (said.index(True) if True in said else None) == ends_at
