"""One check of the installation: what it found, and what to do where that is not well."""

from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"


class Check(NamedTuple):
    """``outcome``: ``ok``, ``warn`` (works, but not well, or not everything) or ``fail``; ``do``: what mends it."""

    name: str
    outcome: str
    found: str
    do: str = ""


def good(name: str, found: str) -> Check:
    """Make a check that found nothing to mend."""
    return Check(name, OK, found)
