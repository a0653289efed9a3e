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
from kway.strategies.shared_state import Reach

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
        """Refuse what ``data`` does."""
        return _SPREAD.refuses(job, model, size, level)

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
        """Add what replicas hand each other through memory, and their turns: see ``add_thread_sums``.

        Raises ``RefusedError`` for a model of which replicas would have to do with each other.
        """
        if estimate.workload.not_in_threads:
            raise _refused(estimate.workload.not_in_threads)
        add_thread_sums(estimate, size)


def _refused(why: str) -> RefusedError:
    return RefusedError(
        f"strategy threads with this model: {why}",
        "a replica must neither read what another one wrote nor compute with its weights",
        "keep it in an attribute of the model that copy.deepcopy copies, or use strategy data",
    )


class Steps:
    """How the replicas take steps: the first two in turns, the others at once, unless one of these drew on the host.

    The second one shows whether a step changes what the replicas share: what is made once is there by then.
    """

    def __init__(self, group: Group, notes: list[str]) -> None:
        self._group, self._notes = group, notes
        self._taken, self._drew = 0, False
        self._at_once = False

    @contextmanager
    def taking(self, core: StepCore) -> Iterator[None]:
        """Be open while ``core`` takes a step.

        Raises ``RefusedError`` where a step draws that must not, or changes what other replicas read.
        """
        self._taken += 1
        if self._taken == 1:
            self._apart(core)
            with self._watching_draws(core):
                yield
        elif self._taken == 2:
            # Again: the first step may have put layers into a cache that all have.
            held = self._apart(core)
            others = self._group.objects(held.keys)
            with held.watched(set.intersection(*others)) as changes, self._watching_draws(core):
                yield
            self._refuse(changes.found)
            self._decide()
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

    @contextmanager
    def _watching_draws(self, core: StepCore) -> Iterator[None]:
        with watched() as watch, _drawing(core, watch.draws):
            yield
        self._drew |= watch.found

    def _apart(self, core: StepCore) -> Reach:
        """Return what this replica reaches; raise ``RefusedError`` where that leads one replica to another."""
        held = Reach(core.model, core.job)
        others = self._group.objects(held.own)
        others.pop(self._group.rank)
        self._refuse(held.leads_to(set.union(*others)))
        return held

    def _refuse(self, found: str | None) -> None:
        """Raise on all replicas what one has found."""
        said = [each for each in self._group.objects(found) if each is not None]
        if said:
            raise _refused(said[0])

    def _decide(self) -> None:
        self._at_once = not any(self._group.objects(self._drew))
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
