"""What a mesh axis is, and what it works on.

A layout is data: an ordered mapping from axis names to sizes. A new axis is one new file in this folder with an
``AXIS``; nothing else has to know of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from kway.comm.buckets import BUCKET_BYTES
from kway.comm.group import Group
from kway.cost.estimate import Estimate
from kway.cost.gradients import add_gradient_sums
from kway.job import Job
from kway.step.core import StepCore
from kway.step.open_jobs import OpenJob
from kway.step.presence import Presence
from kway.step.share import Reducer
from kway.step.telling import EACH_STEP, Telling


@dataclass
class Part:
    """One rank's part of a job while an engine opens it. Axes change it in order.

    ``place`` of ``shares``: which share of the global batch this rank computes; ``shards``: the fixed
    micro-shards of a batch, where the level has them. ``global_statistics``: whether the level wants batch
    statistics of the global batch. ``telling``: in which steps ranks tell each other what they called.
    ``beside``: the open jobs that layers of the model are part of already. ``reducer`` acts on the gradients.
    Before weights and buffers are read ``checks`` see that ranks fit together, and then what ``equalise`` holds brings
    buffers to one value on all ranks and returns the names of those that differed. ``notes``: lines for the user that
    come up meanwhile. ``bucket_bytes``: of a bucket of gradients, ``None`` for the usual size. ``taking``
    returns what is open while the rank takes a step. ``opened`` undoes everything at close.
    """

    job: Job
    model: nn.Module
    device: torch.device
    level: str
    global_statistics: bool
    shards: int
    world: Group
    telling: Telling = EACH_STEP
    presence: Presence = field(default_factory=Presence)
    place: int = 0
    shares: int = 1
    batch_group: Group = field(default_factory=Group)
    beside: list[OpenJob] = field(default_factory=list)
    reducer: Reducer | None = None
    checks: list[Callable[[], None]] = field(default_factory=list)
    equalise: list[Callable[[], list[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bucket_bytes: int | None = None
    taking: Callable[[StepCore], AbstractContextManager[None]] = field(default=lambda core: nullcontext())
    opened: ExitStack = field(default_factory=ExitStack)


class Axis(ABC):
    """One named mesh axis.

    ``name`` and accepted ``aliases``; ``order`` of application (lowest first); ``splits_batch``: whether ranks
    along it hold different samples; ``levels``: the exactness levels that it keeps. ``one_process``: whether its ranks
    are threads of one process; then it is the only axis. ``kinds``: the step kinds that it can run, ``None`` for
    all, and ``why_kinds``.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int]
    splits_batch: ClassVar[bool]
    levels: ClassVar[frozenset[str]]
    one_process: ClassVar[bool] = False
    kinds: ClassVar[frozenset[str] | None] = None
    why_kinds: ClassVar[str] = ""

    @abstractmethod
    def sizes(self, devices: int) -> list[int]:
        """List the sizes that make sense on a machine with this many devices, smallest first."""

    @abstractmethod
    def refuses(self, job: Job, model: nn.Module, size: int, level: str) -> str | None:
        """Return why this axis cannot keep ``level`` for this model at this size, or ``None``."""

    @abstractmethod
    def apply(self, part: Part, group: Group) -> None:
        """Change ``part`` so that the ranks of ``group`` work together along this axis. A collective."""

    def price(self, estimate: Estimate, size: int, devices: Sequence[str]) -> None:
        """Add to ``estimate`` what ``size`` of the ``devices`` cost along this axis, in seconds and in bytes of each.

        ``estimate`` has by now what a device takes for its share and holds of the whole model (``Estimate.begin``);
        axes come in their ``order``. Here: where the batch is split gradients are summed once backward has ended, as by
        ``data``. An axis that splits anything else says itself what that saves and costs. Raises ``NotMeasuredError``.
        """
        if self.splits_batch:
            add_gradient_sums(estimate, size, BUCKET_BYTES, hides=False)
        elif size > 1:
            estimate.note(
                f"{self.name}: nothing is known of what it saves and of what its devices send each other"
            )
