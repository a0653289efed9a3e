"""What is to be planned, and the records that a user gives for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kway.devices.cpu import threads_for
from kway.errors import UsageError
from kway.job import Job
from kway.measurements import Measurements
from kway.planned import device_type
from kway.planning.candidates import Candidate, Left, candidates
from kway.planning.price import Scaling
from kway.records import Cluster
from kway.workload import Workload

AUTO = "auto"


@dataclass(frozen=True)
class Asked:
    """What is to be planned. ``sets`` of devices, ``named`` by the user or all; ``strategies``, ``step_kinds``: those
    named, ``None`` for all.
    """

    job: Job
    cluster: Cluster
    sets: list[list[str]]
    strategies: list[str] | None
    step_kinds: list[str] | None
    level: str
    shards: int
    scaling: Scaling
    refused: Callable[[Mapping[str, int], Sequence[str]], str]
    named: bool = False

    @property
    def device_types(self) -> list[str]:
        """The types of device among the sets, in their order."""
        return list(dict.fromkeys(device_type(devices[0]) for devices in self.sets))

    def counts(self, of: str) -> list[int]:
        """Return the numbers of devices of a type, smallest first."""
        return sorted({len(devices) for devices in self.sets if device_type(devices[0]) == of})

    def candidates(self, kinds: Callable[[str], Iterable[str]]) -> tuple[list[Candidate], list[Left]]:
        """Return all candidates with the step kinds that ``kinds`` names by type of device, and what is none."""
        return candidates(
            self.sets, kinds, self.threads, self.level, self.shards, self.strategies, self.refused
        )

    def threads(self, ranks: int, beside_gpu: bool) -> int:
        """Return how many CPU threads a rank of so many has on this machine."""
        return threads_for(ranks, beside_gpu=beside_gpu)


def workloads_given(given: Any) -> list[Workload]:
    """Return workloads from records, files, or a list of them. Raises ``UsageError``."""
    every = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return [_loaded("workload", each, Workload) for each in every]


def measurements_given(given: Any) -> Measurements | None:
    """Return measurements from a record or a file, ``None`` where none is given. Raises ``UsageError``."""
    found: Measurements | None = None if given is None else _loaded("measurements", given, Measurements)
    return found


def _loaded(what: str, given: Any, kind: Any) -> Any:
    if isinstance(given, kind):
        return given
    if not isinstance(given, str | Path):
        raise UsageError(
            f"{what} is of type {type(given).__name__}",
            f"it must be a {kind.__name__}, or the path of its file",
        )
    return kind.load(Path(given))
