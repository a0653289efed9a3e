"""What others leave of the processors, from Linux's own counters."""

import os

import pytest

from kway.devices.busy import Moment, moment, said, taken


def counters(file, busy, idle, processors=2):
    """Write counters as /proc/stat has them: ``busy`` and ``idle`` ticks of all processors, some of them stolen."""
    rows = [
        f"cpu  {busy - 3} 0 1 {idle} 0 0 0 2 0 0",
        *(f"cpu{n} 0 0 0 0 0 0 0 0 0 0" for n in range(processors)),
    ]
    file.write_text("\n".join([*rows, "intr 5", ""]))


@pytest.mark.parametrize(
    ("usable", "processors", "busy", "idle", "expected"),
    [
        (2, 2, 0, 40, ""),
        (2, 2, 8, 32, ""),  # 0.4 of 2
        (2, 2, 36, 4, "1.8 of 2 processors"),
        (4, 64, 640, 640, ""),  # enough is left for four
        (4, 64, 1270, 10, "63.5 of 64 processors"),
        (2, 2, 0, 0, ""),
    ],
)
def test_a_line_says_where_too_little_is_left(tmp_path, usable, processors, busy, idle, expected):
    file = tmp_path / "stat"
    counters(file, 1000, 5000, processors)
    found = taken(
        usable, file, lambda seconds: counters(file, 1000 + busy, 5000 + idle, processors), look_s=0.0
    )
    assert found == expected
    lines = said(found)
    assert len(lines) == bool(expected)
    assert all(line.startswith(f"other programs keep {expected} busy") for line in lines)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2", "cpu a b c d e f g h\ncpu0 1 2", "intr 5"])
def test_where_nothing_is_told_nothing_is_said(tmp_path, text):
    file = tmp_path / "stat"
    if text is not None:
        file.write_text(text)
    assert taken(2, file, look_s=0.0) == ""


@pytest.mark.parametrize(
    ("usable", "processors", "busy_s", "own_s", "short"),
    [
        (2, 2, 20.0, 20.0, False),  # this process's own work
        (2, 2, 20.0, 10.0, True),  # one processor is left
        (2, 2, 14.0, 10.0, False),
        (1, 2, 12.0, 0.0, False),
        (2, 64, 600.0, 5.0, False),
    ],
)
def test_what_others_did_over_some_time_is_what_this_process_did_not(
    usable, processors, busy_s, own_s, short
):
    ticks = os.sysconf("SC_CLK_TCK")
    before = Moment(1000, 9000, processors, 3.0)
    # Ten seconds later.
    after = Moment(1000 + int(busy_s * ticks), 9000 + 10 * processors * ticks, processors, 3.0 + own_s)
    assert before.may_be_short(usable, after) == short
    assert not before.may_be_short(usable, before)


def test_a_moment_is_of_the_same_counters_and_of_this_process(tmp_path):
    counters(tmp_path / "stat", 1000, 5000)
    found = moment(tmp_path / "stat")
    assert (found.worked, found.all, found.processors) == (1000, 6000, 2)
    assert found.own > 0
    assert moment(tmp_path / "none") is None
