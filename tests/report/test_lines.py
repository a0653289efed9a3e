import math

from kway.report import lines


def test_fit_keeps_a_line_that_fits() -> None:
    assert lines.fit([(0, "epoch 1/2"), (1, "loss 0.5")], 19) == "epoch 1/2  loss 0.5"


def test_fit_drops_the_least_important_first_and_keeps_the_order() -> None:
    fields = [(2, "rate"), (0, "epoch"), (3, "accuracy"), (1, "loss")]
    assert lines.fit(fields, 20) == "rate  epoch  loss"
    assert lines.fit(fields, 11) == "epoch  loss"


def test_fit_cuts_what_cannot_be_dropped() -> None:
    assert lines.fit([(0, "epoch 1/2"), (1, "loss")], 5) == "epoch"
    assert lines.fit([(0, "epoch")], 0) == ""


def test_numbers_of_records_read_back() -> None:
    assert lines.number(2) == 2.0
    assert math.isnan(lines.number("nan") or 0.0)
    assert lines.number(None) is None
    assert lines.number(True) is None
    assert lines.number("a word") is None


def test_metrics_are_what_is_neither_loss_nor_bookkeeping() -> None:
    record = {
        "epoch": 1,
        "steps": 2,
        "samples": 3,
        "seconds": 4.0,
        "samples_per_s": 5.0,
        "lr": 0.1,
        "train_loss": 0.5,
        "train_accuracy": 0.7,
        "validation_loss": 0.6,
        "accuracy": 0.8,
        "event": "epoch",
        "f1": "nan",
        "note": "x",
    }
    found = lines.metrics(record)
    assert list(found) == ["accuracy", "f1"]
    assert found["accuracy"] == 0.8


def test_rates_and_counts() -> None:
    assert lines.rate(123456, 10) == "12,346 samples/s"
    assert lines.rate(5, 2) == "2.50 samples/s"
    assert lines.rate(5, 0) == "? samples/s"
    assert lines.of(3, 10) == " 3/10"
    assert lines.of(3, None) == "3"
    assert lines.time_left(0.2) == "1 s of training left"
    assert lines.time_left(125.4) == "2 min 05 s of training left"
    assert lines.time_left(math.inf) == ""
