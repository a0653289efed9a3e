import pytest

from kway.units import bytes_text, counted, seconds_text, shown, ulps_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "?"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (80 << 30, "80.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (2 << 50, "2.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.34e-6, "12.3 us"),
        (4.567e-3, "4.57 ms"),
        (0.9996e-3, "1 ms"),
        (0.123, "123 ms"),
        (0.99999, "1 s"),
        (7.891, "7.89 s"),
        (59.99, "1 min 00 s"),
        (125.4, "2 min 05 s"),
        (3600.4, "1 h 00 min"),
        (3720, "1 h 02 min"),
        (7199, "2 h 00 min"),
    ],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("ulps", "text"),
    [
        (None, None),
        (0.0, "0.0"),
        (14.2, "14.2"),
        (9999.9, "9999.9"),
        (13803202268.0, "1.380e+10"),
        (1.0484573081962928e16, "1.048e+16"),
        (float("inf"), "inf"),
    ],
)
def test_ulps(ulps, text):
    assert ulps_text(ulps) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1600, "1,600 steps")]
)
def test_what_is_counted(count, text):
    assert counted(count, "step") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**19, "1" + 19 * "0"),
        (10**20, "1e+20 or more"),
        (-(10**5000), "-1e+5000 or more"),
        ("a\nb", r"'a\nb'"),
        ("a" * 99, "'" + 56 * "a" + "..."),
        (True, "True"),
    ],
    ids=["whole", "huge", "negative", "lines", "long", "truth"],
)
def test_a_value_is_shown_on_a_line(value, text):
    assert shown(value) == text
