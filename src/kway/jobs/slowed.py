"""Why a run took longer than predicted, where other programs are at work."""

from collections.abc import Mapping

from kway.devices import busy
from kway.devices.topology import discover
from kway.planned import device_type
from kway.records import Training
from kway.units import seconds_text

# Of what was measured, the part by which a prediction falls short before a reason is looked for.
FAR_OFF = 0.3


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
    text = (
        f"steps took {seconds_text(measured)}, {seconds_text(predicted_s)} were predicted: "
        f"other programs keep {others} busy"
    )
    threads = record.machine.get("threads", 1)
    if device_type(record.device_set[0]) == "cpu" and threads > 1 and busy.spins(environ):
        text += (
            f", and {threads} threads of a CPU device lose most beside them: OMP_WAIT_POLICY=passive may help "
            "(docs/guide/speed.md)"
        )
    return [text]
