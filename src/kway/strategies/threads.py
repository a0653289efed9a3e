"""Data parallelism in one process: a replica a device, each in a thread of its own, as ``nn.DataParallel`` has it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import nn

from kway.comm.group import Group
from kway.cost.estimate import Estimate
from kway.cost.gradients import add_thread_sums
from kway.errors import RefusedError
from kway.job import Job
from kway.step.core import StepCore
from kway.step.host_draws import OnDevice, watched
from kway.step.seeds import UPDATE, Draws, Keyed
from kway.strategies.base import Axis, Part
from kway.strategies.data import Data
from kway.strategies.shared_variables import shared_variable

_SPREAD = Data()


class Threads(Axis):
    """``threads=k``: as ``data=k``, by k threads of one process, which share its interpreter and its memory."""

    name: ClassVar[str] = "threads"
    aliases: ClassVar[tuple[str, ...]] = ("dp",)
    order: ClassVar[int] = 91
    splits_batch: ClassVar[bool] = True
    levels: ClassVar[frozenset[str]] = _SPREAD.levels
    one_process: ClassVar[bool] = True
    kinds: ClassVar[frozenset[str] | None] = frozenset({"eager"})
    why_kinds: ClassVar[str] = "compiler and recorder of a process are not made for several threads at once"

    def sizes(self, devices: int) -> list[int]:
        """Any number of devices works."""
        return _SPREAD.sizes(devices)

    def refuses(self, job: Job, model: nn.Module, size: int, level: str) -> str | None:
        """Refuse what ``data`` does, and a model in which a forward pass reads what hooks write for all replicas."""
        return _SPREAD.refuses(job, model, size, level) or (shared_variable(model) if size > 1 else None)

    def apply(self, part: Part, group: Group) -> None:
        """Do what ``data`` does, and let the replicas compute at once where they can."""
        if group.size > 1 and not group.one_process:
            raise RefusedError(
                f"threads={group.size} over {group.size} processes",
                "its ranks are threads of one",
                "use data",
            )
        _SPREAD.apply(part, group)
        if group.size > 1:
            part.notes.append(f"threads: {group.size} replicas in one process")
            part.taking = Steps(group, part.notes).taking

    def price(self, estimate: Estimate, size: int, devices: Sequence[str]) -> None:
        """Add what replicas hand each other through memory, and their turns: see ``add_thread_sums``."""
        add_thread_sums(estimate, size)


class Steps:
    """How the replicas take steps: the first in turns, the others at once, unless the first drew on the host."""

    def __init__(self, group: Group, notes: list[str]) -> None:
        self._group, self._notes = group, notes
        self._at_once: bool | None = None

    @contextmanager
    def taking(self, core: StepCore) -> Iterator[None]:
        """Be open while ``core`` takes a step. Raises ``RefusedError`` where a step draws that must not."""
        if self._at_once is None:
            with watched() as watch, _drawing(core, watch.draws):
                yield
            self._decide(watch.found)
        elif not self._at_once:
            yield
        else:
            keys: list[int] = []

            def on_device(given: Sequence[int], device: torch.device) -> Draws:
                keys[:] = given
                return OnDevice(given, device)

            with self._group.side_by_side(), _drawing(core, on_device):
                yield
            # As a step in turns leaves them.
            Keyed(keys, core.device).at(UPDATE)

    def _decide(self, drew: bool) -> None:
        self._at_once = not any(self._group.objects(drew))
        if not self._at_once:
            self._notes.append(
                "threads: the replicas compute one after the other, since the step draws random numbers on the CPU, of "
                "which a process has one generator"
            )


@contextmanager
def _drawing(core: StepCore, draws: Callable[[Sequence[int], torch.device], Draws]) -> Iterator[None]:
    before, core.draws = core.draws, draws
    try:
        yield
    finally:
        core.draws = before


AXIS = Threads()
