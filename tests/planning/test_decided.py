"""What a check decides, and what sentences on predictions say after it."""

import pytest
from tests.planning.pricers import found
from tests.planning.records import planned

from kway.planning.decided import fastest, reasons
from kway.report.plans import lines_of


def checked(result, **measured_s):
    """Return rows as a check leaves them: strategies that took so long a step."""
    for row in result.rows:
        seconds = measured_s.get(row["strategy"].replace("=", ""))
        if seconds is not None:
            row |= {"measured_step_s": seconds, "error": row["step_s"] / seconds - 1, "rounds": [seconds]}
    return result.rows


def decided(result, **measured_s):
    """Return the record of a plan after a check."""
    rows = checked(result, **measured_s)
    chosen = fastest(rows)
    for row, reason in zip(rows, reasons(rows, result.chosen, chosen), strict=True):
        row["reason"] = reason
    check = {"candidates": 2, "mean_error": 0.5, "right_order": 0, "pairs": 1}
    record = planned(result, check=check)
    return type(record).from_dict({**record.to_dict(), "chosen": chosen})


def test_what_was_measured_fastest_is_chosen_whatever_was_predicted():
    record = decided(found(256, strategies=["single", "data"]), single=20e-3, data2=79.2e-3)
    assert [row["strategy"] for row in record.candidates] == ["data=2", "single"]
    assert record.best["strategy"] == "single"
    lines = "\n".join(lines_of(record))
    assert (
        "chosen     one device (cpu:1): 20 ms a step of 256 samples, measured (predicted: 26.6 ms; data=2 on cpu:2 "
        in (lines)
    )
    assert "was predicted to be faster and took 79.2 ms)" in lines
    table = lines.splitlines()
    assert (table[1].split()[0], table[2].split()[0]) == ("1", "2*")
    # What is said of the other order is of the prediction.
    first, second = (row["reason"] for row in record.candidates)
    assert first.startswith(
        "by prediction fastest: 1.86 times as fast as one device (cpu:1): compute falls by"
    )
    assert second.startswith("measured fastest; by prediction ")
    assert "one device (cpu:1); measured fastest; by prediction" in repr(record)


def test_where_both_agree_the_sentences_are_as_they_were():
    result = found(256, strategies=["single", "data"])
    before = [row["reason"] for row in result.rows]
    record = decided(result, single=30e-3, data2=15e-3)
    assert (record.chosen, [row["reason"] for row in record.candidates]) == (0, before)
    assert "chosen     data=2 on cpu:2: 15 ms a step of 256 samples, measured (predicted: 14.3 ms)\n" in (
        "\n".join(lines_of(record)) + "\n"
    )


def test_a_sentence_that_measured_times_do_not_bear_out_is_of_the_prediction_alone():
    """Threads were predicted to be a little slower than ranks; one device is as slow as was predicted."""
    result = found(256)
    names = [row["strategy"] for row in result.rows]
    record = decided(result, single=30e-3, data2=20e-3, threads2=10e-3)
    of = {row["strategy"]: row["reason"] for row in record.candidates}
    assert record.best["strategy"] == "threads=2"
    assert names == [row["strategy"] for row in record.candidates]
    assert of["threads=2"].startswith("measured fastest; by prediction ")
    assert of["data=2"].startswith("by prediction fastest: ")
    assert "prediction" not in of["single"]


def test_the_time_of_a_sample_counts_where_each_device_has_a_batch():
    record = decided(found(128, weak=True, strategies=["single", "data"]), single=14e-3, data2=30e-3)
    assert record.best["strategy"] == "single"
    assert "was predicted to be faster and took 30 ms a step of 256 samples)" in "\n".join(lines_of(record))
    record = decided(found(128, weak=True, strategies=["single", "data"]), single=14e-3, data2=26e-3)
    assert record.best["strategy"] == "data=2"


@pytest.mark.parametrize(("measured_s", "chosen"), [({"single": 50e-3}, 1), ({}, None)])
def test_what_was_not_measured_is_not_chosen_after_a_check(measured_s, chosen):
    rows = checked(found(256, strategies=["single", "data"]), **measured_s)
    assert fastest(rows) == chosen
    if chosen is not None:
        record = decided(found(256, strategies=["single", "data"]), **measured_s)
        assert "data=2 on cpu:2 was predicted to be faster and was not measured)" in "\n".join(
            lines_of(record)
        )


def test_more_ranks_than_cores_are_not_chosen_by_a_check_either():
    sets = [["cpu"], ["cpu"] * 4]
    rows = checked(found(256, sets=sets, strategies=["single", "data"]), single=20e-3, data4=10e-3)
    assert rows[fastest(rows)]["strategy"] == "single"
    assert reasons(rows, 0, 0)[1].startswith("never chosen: 4 ranks share fewer cores")
    alone = checked(found(256, sets=sets[1:], strategies=["data"]), data4=10e-3)
    assert fastest(alone) == 0
