"""Where a job runs: in this process, on ranks that kway starts, or on ranks that are already there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from kway.devices import torch_facts
from kway.devices.cpu import MOST_BESIDE_A_GPU, threads_for
from kway.devices.select import parse, spelled
from kway.devices.select import warnings as device_warnings
from kway.devices.topology import discover
from kway.errors import KwayError, UsageError
from kway.launch import local
from kway.launch.in_time import ends_in_time
from kway.launch.joining import join
from kway.launch.own_watch import watching
from kway.launch.status import Status
from kway.launch.torchrun import from_environment
from kway.planned import device_type
from kway.records import Cluster, Plan
from kway.step.kinds import DEFAULT_KIND, check_kind
from kway.step.seeds import preserved
from kway.step.settings import Settings, check_settings
from kway.strategies.layout import SINGLE, check_level, check_step_kind, fit, named_sizes, one_process, title
from kway.strategies.levels import DEFAULT_SHARDS
from kway.units import counted
from kway.world import StopRequest, World

Emit = Callable[[Any], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """What a task gets in a process that kway did not start: the same as in one that it did."""

    world: World
    emit: Emit = field(compare=False)
    stop: StopRequest = field(default_factory=StopRequest, compare=False)
    status: Status = field(default_factory=Status, compare=False)


@dataclass(frozen=True)
class Place:
    """A plan, and how to reach its devices. ``joined``: this process's place among ranks that are there."""

    plan: Plan
    threads: int
    joined: World | None
    notices: tuple[str, ...] = ()

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that speaks and writes."""
        return self.joined is None or self.joined.is_main

    @property
    def starts_ranks(self) -> bool:
        """Whether running here means starting processes."""
        return self.joined is None and self.plan.devices > 1 and not self.in_threads

    @property
    def in_threads(self) -> bool:
        """Whether the ranks are threads of this process."""
        return one_process(self.plan.layout)

    def run(
        self,
        task: Callable[..., Any],
        *arguments: Any,
        on_event: Emit | None = None,
        logs: Path | None = None,
        echo: bool = True,
        ranks: Any = None,
        stop: StopRequest | None = None,
        apart: bool = False,
        stall_timeout: timedelta | None = None,
        leaves: Callable[[], str] | None = None,
    ) -> list[Any]:
        """Call ``task(context, *arguments)`` on every rank; return the results by rank.

        Inside ranks that are already there, the list holds this rank's result only. ``ranks`` may hold CPU
        ranks that are already started (``launch.local.Ranks``). ``stop``: set when ranks are to stop early.
        ``apart``: a process of its own also for one device. With ``stall_timeout`` a rank that the others wait for
        and that makes no progress for so long ends the task with ``StallError``. ``leaves``: makes what is said where
        a signal ends a rank of another launcher (``ends_in_time``). Ranks that are threads of this process know neither
        ``ranks`` nor ``apart`` nor ``stall_timeout``.
        """
        emit, stop = on_event or _ignore, stop or StopRequest()
        if self.joined is not None:
            with (
                with_threads(self.joined.threads),
                preserved(torch.device(self.joined.device)),
                watching(self.joined, stall_timeout) as status,
                ends_in_time(self.joined, status, leaves),
            ):
                return [task(Context(self.joined, emit, stop, status), *arguments)]
        if self.plan.devices == 1 and not apart:
            world = World(device=self.plan.device_set[0], threads=self.threads)
            with (
                with_threads(self.threads),
                preserved(torch.device(world.device)),
                watching(world, stall_timeout) as status,
            ):
                return [task(Context(world, emit, stop, status), *arguments)]
        if self.in_threads:
            # Imported here: few runs need it.
            from kway.jobs import threads

            return threads.run(
                lambda world, status: Context(world, emit, stop, status),
                task,
                arguments,
                self.plan.device_set,
                self.threads,
            )
        settings = torch_settings()
        if ranks is not None:
            watched = {} if stall_timeout is None else {"stall_timeout": stall_timeout}
            found: list[Any] = ranks.run(
                as_in_the_caller,
                settings,
                task,
                *arguments,
                size=self.plan.devices,
                on_event=emit,
                stop=stop,
                **watched,
            )
            return found
        return local.run(
            as_in_the_caller,
            self.plan.device_set,
            settings,
            task,
            *arguments,
            logs=logs,
            threads=self.threads,
            echo=echo,
            on_event=emit,
            preload=("torch", "kway.strategies.engine"),
            stop=stop,
            stall_timeout=stall_timeout,
        )


def torch_settings() -> dict[str, Any]:
    """Return the process-wide settings of torch that change results."""
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    }


def as_in_the_caller(
    context: Any, settings: dict[str, Any], task: Callable[..., Any], *arguments: Any
) -> Any:
    """Run a task on a rank under the torch settings of the process that asked for it."""
    with with_settings(settings):
        return task(context, *arguments)


@contextmanager
def with_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Let torch have these ``torch_settings`` while open."""
    before = torch_settings()
    _apply(settings)
    try:
        yield
    finally:
        _apply(before)


def _apply(settings: dict[str, Any]) -> None:
    torch.set_default_dtype(settings["dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = settings["cudnn"]


def _ignore(event: Any) -> None:
    """Take an event that nobody asked for."""


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` CPU threads while open."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def place(
    devices: Any = "auto",
    strategy: str = "auto",
    exactness: str = "math",
    shards: int = DEFAULT_SHARDS,
    patient: bool = False,
    step_kind: str = DEFAULT_KIND,
    settings: Mapping[str, Any] | None = None,
) -> Place:
    """Resolve a device set, a strategy, a level and a step kind into a place. Nothing is started.

    Inside ranks that are there (torchrun and its like) their number is the number of devices; ``patient``: their
    group has no time limit, because kway ends what makes no progress. Raises ``UsageError``.
    """
    cluster, devices = discover(), spelled(devices)
    if not cluster.torch.get("remembered"):
        # torch is loaded here anyway: what only it knows is kept for `kway devices`, which does not load it.
        torch_facts.remember()
    joined = _joined(devices, cluster)
    sized = strategy if strategy in ("auto", SINGLE) else _size_of(strategy)
    if joined is not None:
        chosen = [joined.device] * joined.size
    elif devices == "auto" and isinstance(sized, int):
        chosen = parse(sized, cluster)
    elif devices == "auto" and strategy == SINGLE:
        chosen = parse("auto", cluster)[:1]
    else:
        chosen = parse(devices, cluster)
    plan = choose(chosen, strategy, exactness, shards, step_kind, settings)
    if joined is not None and one_process(plan.layout):
        raise UsageError(
            f"strategy {plan.strategy} inside {joined.size} ranks that are already there",
            "its ranks are threads of one process",
            "start one process, or use strategy data",
        )
    if joined is not None:
        join(joined, patient=patient)
    # Of joined ranks those of this machine count, which a launcher may have bound to cores of their own.
    here = chosen if joined is None else chosen[: joined.local_size]
    lines = device_warnings(here, cluster, 0 if joined is None else joined.cores)
    return Place(plan, rank_threads(chosen), joined, tuple(lines))


def rank_threads(device_set: list[str]) -> int:
    """Return the intra-op CPU threads of a rank on such a device set."""
    return threads_for(len(device_set), beside_gpu=device_set[0] != "cpu")


def choose(
    device_set: list[str],
    strategy: str,
    exactness: str,
    shards: int = DEFAULT_SHARDS,
    step_kind: str = DEFAULT_KIND,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Make the plan for named devices. Raises ``UsageError`` for a strategy or step kind that does not fit them."""
    count = len(device_set)
    if strategy == "auto":
        layout = {} if count == 1 else fit("data", count)
        reason = "one device" if count == 1 else f"data parallelism over all {count} devices"
    else:
        layout, reason = fit(strategy, count, device_type(device_set[0])), "named by the user"
    check_level(layout, exactness, shards)
    check_kind(step_kind, device_set)
    check_step_kind(layout, step_kind)
    if settings is not None and not isinstance(settings, Mapping):
        raise UsageError(
            f"settings={settings!r}", "they must be values by name", 'pass {"optimizer": "fused"}, say'
        )
    chosen = Settings.of(settings or {})
    check_settings(chosen, exactness)
    return Plan(title(layout), layout, device_set, exactness, reason, shards, step_kind, chosen.named())


def _size_of(strategy: str) -> int | None:
    """Return the number of devices that a strategy names, or ``None`` where it leaves it open."""
    total = 1
    for _, size in named_sizes(strategy):
        if size is None:
            return None
        total *= size
    return total


def _joined(devices: Any, cluster: Cluster) -> World | None:
    kind = "cuda" if cluster.gpus and not str(devices).startswith("cpu") else "cpu"
    world = from_environment(device=kind)
    if world is None or world.size == 1:
        return None
    if devices != "auto":
        asked = parse(devices, cluster)
        if len(asked) != world.size and world.local_size == world.size:
            raise UsageError(
                f"devices={devices!r} inside {world.size} ranks that are already there",
                f"it names {counted(len(asked), 'device')}",
                f"use devices='auto', or start {counted(len(asked), 'rank')}",
            )
    if kind == "cuda":
        world = replace(world, threads=min(world.threads, MOST_BESIDE_A_GPU))
    return world


def on_main(where: Place, act: Callable[[], T]) -> T:
    """Do something once for all ranks of a job: rank 0 does, and all get its result, or its error of kway.

    A collective inside ranks that are already there.
    """
    if where.joined is None:
        return act()
    from kway.comm.group import Group

    outcome: tuple[Any, KwayError | None] = (None, None)
    with ends_in_time(where.joined):
        if where.joined.is_main:
            try:
                outcome = act(), None
            except KwayError as problem:
                outcome = None, problem
        result, refused = Group(where.joined.rank, where.joined.size).objects(outcome)[0]
    if refused is not None:
        raise refused
    return result  # type: ignore[no-any-return]
