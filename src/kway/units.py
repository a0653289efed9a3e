"""Numbers with units, for humans and from them."""

import math
import re
from datetime import timedelta

from kway.errors import UsageError

_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
# Ten years: what is longer was not meant.
_LONGEST = 10 * 365 * 86400
_SHOWN = 60
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def counted(count: int, thing: str) -> str:
    """Write a number of things: ``1 step``, ``1,600 steps``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def bytes_text(count: int | None) -> str:
    """Write a number of bytes in binary units: ``512 B``, ``1.5 KiB``, ``23.5 GiB``; ``?`` where unknown."""
    if count is None:
        return "?"
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        # 1023.95 would be written as 1024.0: that belongs to the next unit.
        if abs(value) < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


def rate_text(value: float, unit: str) -> str:
    """Write an amount in decimal prefixes: ``98.2 GFLOP/s``, ``4.81 TB/s``, ``512``; seconds as ``seconds_text``."""
    if unit == "s":
        return seconds_text(value)
    if not unit.endswith("/s"):
        return f"{_digits(value)} {unit}"
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999.6 would be written as 1000: that belongs to the next prefix.
        if abs(value) >= 0.9995 * size:
            return f"{_digits(value / size)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def seconds_text(seconds: float) -> str:
    """Write a duration: ``12.3 us``, ``4.56 ms``, ``7.89 s``, ``2 min 05 s``, ``1 h 02 min``."""
    size = abs(seconds)
    if size < 0.9995e-3:
        return f"{seconds * 1e6:.1f} us"
    if size < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if size < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if abs(whole) < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def ulps_text(ulps: float | None) -> str | None:
    """Write units in the last place: ``14.2``, and from 10,000 on in four digits, ``1.048e+16``; ``None`` stays."""
    if ulps is None:
        return None
    return f"{ulps:.1f}" if ulps < 1e4 else f"{ulps:.3e}"


def shown(value: object) -> str:
    """Return ``repr(value)`` on one line of at most some sixty characters; of a huge whole number its magnitude."""
    if isinstance(value, int) and abs(value) >= 10**20:
        # More digits than Python writes at all, perhaps.
        return f"{'-' if value < 0 else ''}1e+{math.floor(math.log10(abs(value)))} or more"
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def duration(what: str, value: object) -> timedelta | None:
    """Read ``90s``, ``5min``, ``2h``, a number of seconds or a ``timedelta``; ``None`` stays ``None``.

    Raises ``UsageError``, which calls the value ``what``, for anything else and for what is not above zero.
    """
    if value is None:
        return None
    seconds = math.nan
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (found := _DURATION.fullmatch(value.strip().lower())):
        seconds = float(found[1]) * _SECONDS.get(found[2] or "s", math.nan)
    if not 0 < seconds < _LONGEST:
        raise UsageError(f"{what} {value}", "it must be a time above zero, like 90s, 5min or 2h")
    return timedelta(seconds=seconds)
