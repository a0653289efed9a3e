"""What could be chosen: every layout that is there, on every device set, with every step kind."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from kway.errors import RefusedError, UsageError
from kway.planned import device_type
from kway.records import Cluster
from kway.step.kinds import check_kind
from kway.strategies.layout import axes, check_level, check_step_kind, fit, title


@dataclass(frozen=True)
class Candidate:
    """One way to run a job. ``layout``: sizes by axis, outermost first; ``threads``: of the CPU, of one rank."""

    layout: Mapping[str, int]
    device_set: tuple[str, ...]
    step_kind: str
    threads: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.device_set)

    @property
    def strategy(self) -> str:
        """The layout as users write it."""
        return title(self.layout)

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return device_type(self.device_set[0])


@dataclass(frozen=True)
class Left:
    """What is no candidate, and why."""

    strategy: str
    device_set: tuple[str, ...]
    step_kind: str
    why: str

    def to_dict(self) -> dict[str, object]:
        """Return the row for the record."""
        return {
            "strategy": self.strategy, "devices": len(self.device_set), "device_set": list(self.device_set),
            "step_kind": self.step_kind, "why": self.why,
        }  # fmt: skip


def device_sets(cluster: Cluster) -> list[list[str]]:
    """Return every number of devices of a machine: GPUs from one to all, then CPU ranks from one to as many as cores.

    GPUs come in torch's order: kway takes the first k for a number k.
    """
    gpus = [f"cuda:{gpu['index']}" for gpu in cluster.gpus]
    sets = [gpus[:count] for count in range(1, len(gpus) + 1)]
    return sets + [["cpu"] * count for count in range(1, int(cluster.cpu["usable"]) + 1)]


def layouts(devices: int) -> list[dict[str, int]]:
    """Return every layout of so many devices: each axis alone, and those that can be combined in all sizes.

    An axis of size 1 does nothing and is left out: one device has one layout.
    """
    if devices == 1:
        return [{}]
    known = axes()
    by_order = sorted(known, key=lambda name: known[name].order)
    found = []
    for count in range(1, len(by_order) + 1):
        for chosen in combinations(by_order, count):
            names = chosen[::-1]
            if count > 1 and any(known[name].one_process for name in names):
                continue
            for sizes in _products(devices, count):
                if all(size in known[name].sizes(devices) for name, size in zip(names, sizes, strict=True)):
                    found.append(dict(zip(names, sizes, strict=True)))
    return found


def _products(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``total`` as a product of ``count`` numbers above 1, in order."""
    if count == 1:
        yield (total,)
        return
    for first in range(2, total):
        if total % first == 0 and total // first > 1:
            yield from ((first, *rest) for rest in _products(total // first, count - 1))


def candidates(
    sets: Iterable[Sequence[str]],
    step_kinds: Callable[[str], Iterable[str]],
    threads: Callable[[int, bool], int],
    level: str,
    shards: int,
    strategies: Sequence[str] | None = None,
    refused: Callable[[Mapping[str, int], Sequence[str]], str] = lambda layout, devices: "",
) -> tuple[list[Candidate], list[Left]]:
    """Return all candidates over ``sets``, and what is none with the reason.

    ``step_kinds(type of device)`` names the kinds to try there; ``threads(ranks, beside a GPU)`` says how many threads
    of the CPU a rank gets. ``strategies``: as users write them, ``None`` for all. ``refused(layout, devices)`` says why
    the job cannot be trained so. Raises ``UsageError`` for a strategy that fits none of the sets.
    """
    found: list[Candidate] = []
    left: list[Left] = []
    distinct = list(dict.fromkeys(tuple(each) for each in sets))
    for name in strategies or ():
        _check_fits(name, distinct)
    for devices in distinct:
        kind_of_device = device_type(devices[0])
        own_threads = threads(len(devices), kind_of_device != "cpu")
        for layout in _wanted(strategies, len(devices)):
            why = _kept(layout, level, shards) or refused(layout, devices)
            for kind in step_kinds(kind_of_device):
                reason = why or _runs(layout, devices, kind)
                if reason:
                    left.append(Left(title(layout), devices, kind, reason))
                else:
                    found.append(Candidate(layout, devices, kind, own_threads))
    return found, left


def _wanted(strategies: Sequence[str] | None, devices: int) -> list[dict[str, int]]:
    if strategies is None:
        return layouts(devices)
    every = []
    for name in strategies:
        try:
            layout = fit(name, devices)
        except UsageError:
            continue  # it fits another number of devices
        every.append({axis: size for axis, size in layout.items() if size > 1})
    return [layout for place, layout in enumerate(every) if layout not in every[:place]]


def _check_fits(strategy: str, sets: Sequence[tuple[str, ...]]) -> None:
    """Raise the ``UsageError`` of a strategy that fits none of the device sets."""
    problem: UsageError | None = None
    for devices in sets:
        try:
            fit(strategy, len(devices), device_type(devices[0]))
            return
        except UsageError as error:
            problem = error
    if problem is not None:
        raise problem


def _kept(layout: Mapping[str, int], level: str, shards: int) -> str:
    """Say why a layout cannot keep the level, or ``""``. Raises ``UsageError`` for a level that there is not."""
    try:
        check_level(layout, level, shards)
    except RefusedError as error:
        return str(error)
    return ""


def _runs(layout: Mapping[str, int], devices: Sequence[str], step_kind: str) -> str:
    """Say why a step kind cannot run there, or ``""``. Raises ``UsageError`` for a kind that there is not."""
    try:
        check_kind(step_kind, devices)
        check_step_kind(layout, step_kind)
    except RefusedError as error:
        return str(error)
    return ""
