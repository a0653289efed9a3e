"""Why a step reads a value back from the device, in words for the user where kway itself asks other ranks."""

from collections.abc import Sequence

_FLAGS, _ALL_SAMPLES = "kway's flat.py", "kway's gather.py"
_MOST_NAMED = 3


def why_read(places: Sequence[str], unused: Sequence[str]) -> str:
    """Say why, given where (see ``observe.waits``) and the names of trained parameters that no rank has a gradient for.

    What ranks ask each other comes first: it is so in every step.
    """
    if any(place.startswith(_FLAGS) for place in places):
        # The flags by which ranks tell each other which parameters have a gradient.
        if not unused:
            return (
                "this device has no gradient for a parameter, and asks in every step whether another has one"
            )
        more = len(unused) - _MOST_NAMED
        named = ", ".join(map(repr, unused[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
        return (
            f"no device has a gradient for {named}, which they ask each other in every step: freeze what is not used "
            "(requires_grad_(False))"
        )
    if any(place.startswith(_ALL_SAMPLES) for place in places):
        return "kway.all_samples asks each device how many samples it holds"
    return f"the step reads a value back from the device ({places[0]})"
