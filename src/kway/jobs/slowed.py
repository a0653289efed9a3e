"""Why a run took longer than predicted, or than it could have, where other programs are at work."""

from collections.abc import Mapping

from kway.devices import busy
from kway.devices.topology import discover
from kway.planned import device_type
from kway.records import Training
from kway.units import seconds_text

# Of what was measured, the part by which a prediction falls short before a reason is looked for.
FAR_OFF = 0.3
# A run that took so many seconds bears a look that takes a fifth of one.
LONG_S = 4.0


def slowed(record: Training, predicted_s: float, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a line where the steps of a run took far longer than predicted and others keep processors busy.

    Looks at processors, for a fifth of a second, only where the prediction is far off. ``record``: of a run that has
    ended in this process, and whose ranks have.
    """
    measured = record.measured_step_s
    if not measured or predicted_s / measured - 1 > -FAR_OFF:
        return []
    others = busy.taken(discover().cpu["usable"])
    if not others:
        return []
    text = f"steps took {seconds_text(measured)}, {seconds_text(predicted_s)} were predicted: "
    return [text + _beside(record, others, environ)]


def beside_others(
    record: Training, since: busy.Moment | None, environ: Mapping[str, str] | None = None
) -> list[str]:
    """Return a line where nothing was predicted of a run on CPUs, and others have kept processors busy meanwhile.

    ``since``: when it began. Looks at processors for a fifth of a second only where they may have, and the run took so
    long that the look is nothing beside it. ``record``: as in ``slowed``.
    """
    step_s, now = record.measured_step_s, busy.moment()
    if since is None or now is None or not step_s or record.wall_s < LONG_S:
        return []
    if device_type(record.device_set[0]) != "cpu":
        return []
    usable = discover().cpu["usable"]
    others = busy.taken(usable) if since.may_be_short(usable, now) else ""
    if not others:
        return []
    return [f"steps took {seconds_text(step_s)} while {_beside(record, others, environ)}"]


def _beside(record: Training, others: str, environ: Mapping[str, str] | None) -> str:
    text = f"other programs keep {others} busy"
    threads = record.machine.get("threads", 1)
    if device_type(record.device_set[0]) == "cpu" and threads > 1 and busy.spins(environ):
        text += (
            f", and {threads} threads of a CPU device lose most beside them: OMP_WAIT_POLICY=passive may help "
            "(docs/guide/speed.md)"
        )
    return text
