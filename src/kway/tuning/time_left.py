"""Why there is no time to tune, in words."""

import math

from kway.units import seconds_text

# By how much more than what it seems to take users are told to give.
ROOM = 1.25


def lacking_time(spent_s: float, rest_s: float, seconds: float, stops: bool) -> str:
    """Say why nothing is tried where that takes ``rest_s`` more than the ``spent_s``; ``""``: ``seconds`` are enough.

    ``stops``: whether the run was asked to stop.
    """
    if stops:
        return "there is no time left: the run was asked to stop"
    if spent_s + rest_s < seconds:
        return ""
    left, give = max(0.0, seconds - spent_s), math.ceil(ROOM * (spent_s + rest_s))
    return (
        f"to try one way and to measure it again takes some {seconds_text(rest_s)}, for which there is no time: "
        f"{seconds_text(left)} of {seconds_text(seconds)} are left; give {give} s or more (--tune-seconds {give})"
    )
