"""Step kinds: how the operations of a step reach the device. What they compute is the level's business.

Torch is not imported here: flags and their help name the kinds.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kway.devices.compilers import missing
from kway.errors import RefusedError
from kway.registry import known

if TYPE_CHECKING:
    from kway.data.share import Share
    from kway.step.core import StepCore
    from kway.step.outcome import Outcome
    from kway.step.settings import Settings
    from kway.step.tally import Tally

DEFAULT_KIND = "eager"


@dataclass(frozen=True)
class StepKind:
    """One way to run a step. ``summary``: one line for the user; ``needs``: the type of device it cannot do without.

    ``compiles``: whether the model goes through torch.compile; ``records``: whether the step is recorded and replayed.
    """

    name: str
    summary: str
    needs: str | None = None
    compiles: bool = False
    records: bool = False


KINDS: dict[str, StepKind] = {
    kind.name: kind
    for kind in (
        StepKind("eager", "operation by operation"),
        StepKind(
            "compiled",
            "the model through torch.compile, on GPUs a built-in loss and small arithmetic too",
            compiles=True,
        ),
        StepKind("graph", "the whole step recorded once as a CUDA graph", needs="cuda", records=True),
        StepKind(
            "compiled-graph", "both: the compiled step, recorded", needs="cuda", compiles=True, records=True
        ),
    )
}


class Runner(Protocol):
    """Takes the optimizer steps of one rank."""

    @property
    def kind(self) -> str:
        """The step kind whose arithmetic steps have: the one asked for, or a simpler one where a compiler lacks."""

    @property
    def ran(self) -> str:
        """The step kind that really ran so far, which may be simpler than ``kind``."""

    @property
    def notices(self) -> list[str]:
        """Lines for the user: why something runs otherwise than asked for."""

    @property
    def at_the_end(self) -> list[str]:
        """Lines for the user where the run ends here: that it was too short for what was asked for."""

    def run(self, share: "Share", step: int, tally: "Tally | None" = None) -> "Outcome":
        """Take optimizer step number ``step``: see ``StepCore.run``."""

    def forget(self) -> None:
        """Forget what was noted of where parameters and states lie: they may have moved."""


class Eager:
    """The step itself, operation by operation."""

    kind = ran = "eager"

    def __init__(self, core: "StepCore") -> None:
        self._core = core
        self.notices: list[str] = []
        self.at_the_end: list[str] = []

    def run(self, share: "Share", step: int, tally: "Tally | None" = None) -> "Outcome":
        """Take optimizer step number ``step``: see ``StepCore.run``."""
        return self._core.run(share, step, tally)

    def forget(self) -> None:
        """Do nothing: nothing was noted."""


def kind_of(name: str) -> StepKind:
    """Return a step kind by name. Raises ``UsageError``."""
    return known("step kind", name, KINDS)


def check_kind(name: str, devices: Iterable[Any]) -> StepKind:
    """Return a step kind by name. Raises ``UsageError``, and ``RefusedError`` where one of ``devices`` cannot run it.

    ``devices``: as torch spells them, ``cuda:0``.
    """
    kind = kind_of(name)
    unfit = [text for text in map(str, devices) if kind.needs not in (None, text.partition(":")[0])]
    if unfit:
        others = [other.name for other in KINDS.values() if other.needs is None]
        raise RefusedError(
            f"step kind {name} on {unfit[0]}", "it needs a CUDA device", f"use {' or '.join(others)}"
        )
    return kind


def open_kind(
    name: str,
    core: "StepCore",
    opened: ExitStack,
    settings: "Settings | None" = None,
    pieces: int | None = None,
) -> Runner:
    """Make what runs the steps of ``core``. ``opened`` undoes at its end what this changes.

    ``settings``: the options of torch's compiler are taken from them; ``pieces``: bytes of parameters after which
    compiled code is cut (see ``kway.step.pieces``), ``None`` for nowhere.

    Raises ``UsageError``, and ``RefusedError`` for a kind that this device cannot run.
    """
    kind = check_kind(name, [core.device])
    lack = missing(core.device.type) if kind.compiles else None
    compiles = kind.compiles and lack is None
    runner: Runner = Eager(core)
    if kind.records:
        # On a CPU nothing of it is ever imported.
        from kway.step.graph import GraphedStep

        runner = GraphedStep(core, traced=not compiles)
        opened.callback(runner.forget)
    if lack is not None:
        runner.notices.append(f"the model is not compiled: {lack}")
    if compiles:
        from kway.step.compiled import compiling

        options = settings.compiler_options if settings is not None else {}
        runner = opened.enter_context(compiling(core, runner, options, pieces))
    return runner
