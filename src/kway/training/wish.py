"""How a run wants to be tuned before it begins: plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wish:
    """How a run is to be tuned. ``seconds``: at most, ``None`` for the usual part of the run.

    ``step_kind``: the only kind that may be chosen, ``None`` for any; ``allowed``: precisions beside the job's own;
    ``remembers``: whether an earlier choice under the same conditions counts; ``why_not``: why nothing may be measured,
    ``""`` where it may.
    """

    seconds: float | None = None
    step_kind: str | None = None
    allowed: tuple[str, ...] = ()
    remembers: bool = True
    why_not: str = ""
