"""A plan as text and as pictures."""

import re
import struct
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from tests.planning.pricers import found, line
from tests.planning.records import planned

from kway.devices.simulated import simulated
from kway.planned import titled
from kway.planning.price import Price
from kway.report.plan_plots import MOST_BARS, WIDTH, _draw_terms, barred, curves, draw
from kway.report.plans import MOST_WIDE, left_out, lines_of, side_by_side, term_names


def many(**options):
    return found(256, cluster=simulated(gpus=4, cores=2), kinds=("eager", "compiled"), **options)


def test_the_table_ranks_and_the_reasons_follow():
    lines = lines_of(planned())
    table = lines[0].splitlines()
    assert table[0].split()[:3] == ["strategy", "devices", "step"]
    assert table[1].split()[:4] == ["1*", "data=2", "cpu:2", "eager"]
    text = "\n".join(lines)
    assert "  1  data=2 on cpu:2: fastest: 1.86 times as fast as one device" in text
    assert "chosen     data=2 on cpu:2: 14.3 ms a step of 256 samples" in text
    assert "serial     3.8% of a step on one device stays" in text
    assert "at most 26.6 times as fast (Amdahl)" in text
    assert "no check is kept here yet (--check makes one)" in text
    # One that was just made, at a busy moment.
    now = {"candidates": 1, "mean_error": 0.3, "right_order": 0, "pairs": 0}
    assert "no check is kept here yet (nor is this one: see the notes)" in "\n".join(
        lines_of(planned(check=now))
    )


def test_every_term_is_named():
    """What is small in each step has no column; what is not in one of them has, however wide the table gets."""

    def price(candidate, batch):
        plain = line()(candidate, batch)
        more = {f"a term with the name {number}": 1e-3 for number in range(6)}
        more |= {"tiny": 1e-6 * candidate.devices, "sometimes": 1e-9 if candidate.devices == 1 else 2e-3}
        return Price({**plain.terms, **more}, plain.memory)

    record = planned(found(256, price))
    lines = "\n".join(lines_of(record)).split("\n")
    assert max(map(len, lines[: lines.index("") + 12])) <= MOST_WIDE
    text = "\n".join(lines)
    for name in term_names(record.candidates):
        assert name in text
    assert "others" not in text
    (small,) = [each for each in lines if each.startswith("small ")]
    assert small == "small      each below 1% of every step, at most: tiny 2.0 us"
    row = next(each for each in record.candidates if each["devices"] == 2)
    columns = [name for name in row["terms"] if name != "tiny"]
    shown = [each for each in lines if each.startswith(titled(row))]
    assert sum(len(re.findall(r"[\d.]+ [mu]s\b", each)) for each in shown) == len(columns)


def test_history_and_check_are_shown():
    result = found(256)
    for row in result.rows:
        row |= {"measured_step_s": row["step_s"] / 1.04, "error": 0.04}
    check = {"candidates": 3, "mean_error": 0.04, "right_order": 3, "pairs": 3}
    record = planned(result, history={"checks": 31, "mean_error": 0.042}, check=check)
    text = "\n".join(lines_of(record))
    assert "+4.0%" in text
    assert "checked    off by 4.0% on average in 3 candidates; in the right order: 3 of 3 pairs" in text
    assert "history    off by 4% on average in 31 checks here" in text


def test_what_is_too_close_because_of_earlier_checks_is_said():
    assert "too close" not in "\n".join(lines_of(planned()))
    off = planned(too_close={"part": 0.03, "checks": 4, "mean_error": 0.02})
    assert "too close" not in "\n".join(lines_of(off))
    two = found(256, strategies=["single", "data"])
    off = planned(two, too_close={"part": 0.12, "checks": 4, "mean_error": 0.12})
    # One device takes 1.86 times as long: nothing is near the one that was chosen.
    assert "too close" not in "\n".join(lines_of(off))
    known = {"part": 0.9, "checks": 4, "mean_error": 0.9}  # in records of before
    (said,) = (each for each in lines_of(planned(too_close=known)) if each.startswith("too close"))
    assert said == (
        "too close  data=2 on cpu:2; threads=2 on cpu:2; one device (cpu:1): within 90% of the fastest, and by so much "
        "predictions of such candidates were off in 4 checks here"
    )


def test_what_counts_of_a_large_error_is_said():
    near = found(64, line(all_reduce_s=2e-3), strategies=["single", "data"], close=0.5)
    known = {"part": 0.5, "checks": 1, "mean_error": 1.616}
    (said,) = (each for each in lines_of(planned(near, too_close=known)) if each.startswith("too close"))
    assert said == (
        "too close  data=2 on cpu:2; one device (cpu:1): within 50% of the fastest, predictions of such candidates "
        "were off by 162% in 1 check here, of which 50% count: all rest on the same times, and are off together"
    )


def test_of_many_that_are_too_close_a_few_are_named():
    record = planned(many(), too_close={"part": 9.0, "checks": 1, "mean_error": 9.0})
    (said,) = (each for each in lines_of(record) if each.startswith("too close"))
    named, _, rest = said.partition(" and ")
    assert named.count(";") == 3
    may = sum(row["fits"] and row["eligible"] for row in record.candidates)
    assert rest.startswith(f"{may - 4} candidates more: within 900% of the fastest")


OLD, NEW = {"device": "cpu", "made": "", "new": False}, {"device": "cpu", "made": "", "new": True}
BASIS, CHECK = "what it rests on may be of a busier moment", "this check may be of a busier moment"


@pytest.mark.parametrize(
    ("errors", "workloads", "said"),
    [
        ((0.5, 0.1), [OLD], BASIS),
        ((0.5, 0.1), [OLD, NEW], BASIS),
        ((0.5, 0.1), [NEW, NEW], ""),  # as after --refresh
        ((0.5, 0.1), [], BASIS),  # a record of before
        ((-0.9, -0.1), [OLD], CHECK),
        ((-0.9, -0.1), [NEW], CHECK),
        ((-0.9, 0.9), [OLD], ""),  # no one moment explains both
        ((-0.1, 0.1), [OLD], ""),
    ],
)
def test_a_check_that_is_far_off_names_the_busier_moment(errors, workloads, said):
    result = found(256)
    for row, error in zip(result.rows, errors, strict=False):
        row |= {"measured_step_s": row["step_s"] / (1 + error), "error": error}
    mean = sum(map(abs, errors)) / 2
    check = {"candidates": 2, "mean_error": mean, "right_order": 0, "pairs": 0}
    lines = "\n".join(lines_of(planned(result, check=check, workloads=workloads)))
    assert lines.count("busier moment") == bool(said)
    assert said in lines


def test_what_does_not_fit_and_what_was_left_are_told():
    record = planned(
        found(256, room=2 << 20),
        left=[
            {
                "strategy": "data=3",
                "devices": 3,
                "device_set": ["cpu"] * 3,
                "step_kind": "eager",
                "why": "no links",
            }
        ],
        estimate_only=True,
    )
    text = "\n".join(lines_of(record))
    assert "-  data=3 on cpu:3, eager: left out: no links" in text
    assert "this machine is not here" in text
    assert "history" not in text


def test_of_much_that_was_left_a_few_lines_are_told():
    why = {
        "strategy": "data=3",
        "devices": 3,
        "device_set": ["cpu"] * 3,
        "step_kind": "eager",
        "why": "no links",
    }
    whole = {"strategy": "any", "devices": 0, "device_set": ["cpu"], "step_kind": "any", "why": "far behind"}
    kind = {**whole, "step_kind": "compiled", "why": "not asked for"}
    text = "\n".join(lines_of(planned(left=[whole, kind, *[why] * 8])))
    assert "-  CPU ranks: left out: far behind" in text
    assert "not asked for" not in text
    assert text.count("no links") == 5
    assert "3 candidates more left out: see left in plan.json" in text


def test_what_was_left_out_is_one_line_a_reason():
    def left(strategy, why):
        return {
            "strategy": strategy,
            "devices": 2,
            "device_set": ["cpu"] * 2,
            "step_kind": "eager",
            "why": why,
        }

    rows = [left("data=2", "no links"), left("threads=2", "one profiler"), left("data=2", "one profiler")]
    assert left_out(rows) == [
        "left out: data=2 on cpu:2, eager: no links",
        "left out: 2 candidates: one profiler",
    ]
    assert left_out(rows, 1)[1] == "left out for 1 more reason"
    assert left_out([{**rows[0], "devices": 0, "device_set": ["cpu"]}]) == []


def test_predicted_and_measured_stand_side_by_side():
    assert side_by_side(1.1e-3, 1e-3) == "predicted  1.1 ms a step, measured 1 ms: off by +10.0%"
    assert side_by_side(1.1e-3, 1e-3, "threads 1").endswith("(the prediction was made without threads 1)")
    assert "too few steps" in side_by_side(1.1e-3, None)


def test_curves_begin_at_one_device_and_keep_the_fastest_of_a_number():
    found_curves = curves(planned(many()))
    assert set(found_curves) == {
        "data on GPUs, eager", "data on GPUs, compiled", "threads on GPUs, eager", "data on CPU ranks, eager",
        "data on CPU ranks, compiled", "threads on CPU ranks, eager",
    }  # fmt: skip
    points = found_curves["data on GPUs, eager"]
    assert [count for count, *_ in points] == [1, 2, 3, 4]
    assert points[0][1] == 1.0
    assert points[1][1] > 1.8


def test_what_was_chosen_has_a_bar_however_far_behind_the_fastest_it_is():
    record = planned(found(256, cluster=simulated(gpus=8, cores=2), kinds=("eager", "compiled")))
    assert len(record.candidates) > MOST_BARS
    far = replace(record, chosen=len(record.candidates) - 1)
    assert barred(far) == [*record.candidates[: MOST_BARS - 1], far.best]
    assert barred(record) == record.candidates[:MOST_BARS]


def test_pictures_are_drawn_for_several_numbers_of_devices(tmp_path):
    paths = draw(planned(many()), tmp_path)
    assert [path.name for path in paths] == ["terms.png", "speedup.png"]
    for path in paths:
        assert struct.unpack(">I", path.read_bytes()[16:20])[0] >= 800
    alone = found(256, sets=[["cpu"]])
    assert [path.name for path in draw(planned(alone), tmp_path)] == ["terms.png"]


def test_terms_come_by_how_much_they_matter():
    assert term_names(found(256, line(all_reduce_s=1.0)).rows) == ["all-reduce", "compute"]


@pytest.mark.parametrize(
    ("measured", "at", "said"), [(2.0, 1.0, ""), (1.05, 1.05, " predicted"), (0.9, 1.0, "")]
)
def test_the_label_of_what_is_predicted_stands_at_its_bar_and_no_cross_is_taken_for_it(measured, at, said):
    record = planned(found(256, strategies=["single"]))
    (row,) = record.candidates
    row["measured_step_s"] = measured * row["step_s"]
    figure = Figure(figsize=(WIDTH, 4.6))
    _draw_terms(figure, record)
    (label,) = figure.axes[0].texts
    assert label.xy[0] == pytest.approx(at * row["step_s"] * 1e3)
    assert label.get_text() == f"26.6 ms{said}"
