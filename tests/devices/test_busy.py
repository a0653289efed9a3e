"""What others leave of the processors, from Linux's own counters."""

import pytest

from kway.devices.busy import said, taken


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
