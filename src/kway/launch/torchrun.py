"""Ranks that another launcher started: torchrun, anything that sets ``RANK`` and ``WORLD_SIZE``, or mpirun.

Also the process group that a script has made by itself, by whatever store.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from kway.backends import backend_of
from kway.errors import UsageError
from kway.launch import mpi
from kway.launch.init_method import ENV, LAST_PORT, VARIABLE, InitMethod, chosen, parse
from kway.world import World

_ADVICE = "start the ranks with torchrun or kway launch, or unset RANK and WORLD_SIZE"


def check_outside(environ: Mapping[str, str] | None = None) -> None:
    """Raise ``UsageError`` inside one of several ranks of a launcher, where nobody wants more of them started."""
    environ = os.environ if environ is None else environ
    by_mpi = {} if _is_said(environ) else mpi.place_by_mpi(environ)
    size = _integer({**environ, **by_mpi}, "WORLD_SIZE", 1)
    if size is not None and size > 1:
        who, variables = ("mpirun", "mpirun's variables") if by_mpi else ("", "RANK and WORLD_SIZE")
        raise UsageError(
            f"this is rank {by_mpi.get('RANK') or environ.get('RANK') or '?'} of {size} already "
            f"({who or 'RANK, WORLD_SIZE'})",
            "each of them would start the script anew, on devices of its own",
            f"start the script itself with what started these ranks, or unset {variables}",
        )


def from_environment(
    environ: Mapping[str, str] | None = None, threads: int | None = None, device: str = "cpu"
) -> World | None:
    """Read this process's place from ``RANK`` and ``WORLD_SIZE``; ``None`` where nothing says that there are ranks.

    Where neither is set, the default process group counts that the script has made, and after that what ``mpirun`` says
    of several ranks (``kway.launch.mpi``).
    ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` are optional: without them all ranks count as ranks of one machine.
    ``device``: ``cpu`` or ``cuda``, of which the rank gets the one with its local rank. ``threads``: intra-op
    CPU threads; ``None`` takes ``OMP_NUM_THREADS``, or this rank's part of the processors. Raises ``UsageError``
    for variables that contradict each other, are no integers, or where more than one rank has no place to meet:
    ``KWAY_INIT_METHOD``, ``MASTER_ADDR`` and ``MASTER_PORT``, or that of ``mpirun`` on one machine.
    """
    group = _own_group() if environ is None else {}
    environ = os.environ if environ is None else environ
    by_mpi: dict[str, str] = {}
    if not _is_said(environ):
        by_mpi = mpi.place_by_mpi(environ)
        if group and any(by_mpi.get(name) != value for name, value in group.items()):
            by_mpi = group  # the script has numbered its ranks otherwise
        if not by_mpi:
            return None
    said = {**environ, **by_mpi}
    rank, size = _integer(said, "RANK", 0), _integer(said, "WORLD_SIZE", 1)
    if rank is None or size is None:
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise UsageError(f"{there} is set, {missing} is not", "a rank needs both", _ADVICE)
    if rank >= size:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={size}", f"ranks go from 0 to {size - 1}", _ADVICE)
    local_rank, local_size = _local_place(said, rank, size)
    if size > 1 and not group:
        meeting_point(environ, size, local_size)
    cores = mpi.bound_within(environ) if by_mpi and by_mpi is not group else 0
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=_device(environ, device, local_rank, local_size),
        backend=backend_of([device]),
        threads=threads or _threads(environ, local_size, cores),
        origin="env",
        cores=cores,
    )


def meet_at(url: str, named: str) -> None:
    """Have this process meet the other ranks at ``url``, as ``KWAY_INIT_METHOD`` does. ``named``: where it was given.

    Raises ``UsageError`` for a URL that cannot be right, and in a process that is no rank of several.
    """
    method = parse(url, named)
    world = from_environment({**os.environ, VARIABLE: str(method)})
    if world is None or world.size == 1:
        raise UsageError(
            f"{named} {url} in a process that is alone",
            "it is where ranks of another launcher meet",
            "start them with mpirun, or set RANK and WORLD_SIZE; or leave it out: kway's own ranks need none",
        )
    os.environ[VARIABLE] = str(method)


def _is_said(environ: Mapping[str, str]) -> bool:
    """Whether ``RANK`` or ``WORLD_SIZE`` is set, which counts before all else."""
    return any(environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))


def _own_group() -> dict[str, str]:
    """Return the place that this process has in a default group of several, which the script has made."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    return {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}


def meeting_point(environ: Mapping[str, str], size: int, local_size: int) -> InitMethod:
    """Return where ``size`` ranks meet. Raises ``UsageError`` where nothing says it."""
    method = chosen(environ)
    addressed = any(environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if method is None and not addressed and not _is_said(environ):
        if local_size < size:
            raise UsageError(
                f"{size} ranks of mpirun on several machines ({local_size} on this one)",
                "they need a place to meet that all can reach",
                f"mpirun -x {VARIABLE}=tcp://HOST_OF_RANK_0:29500, or file:///PATH in a folder that they share",
            )
        return InitMethod(path=mpi.meeting_file(environ), own=True)
    if method is None or str(method) == ENV:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise UsageError(
                    f"{name} is not set",
                    f"{size} ranks need an address to meet at",
                    f"{_ADVICE}, or set {VARIABLE}",
                )
        port = _integer(environ, "MASTER_PORT", 0)
        if port is not None and port > LAST_PORT:
            raise UsageError(f"MASTER_PORT={port}", f"ports go to {LAST_PORT}", _ADVICE)
    return method or InitMethod()


def _integer(environ: Mapping[str, str], name: str, least: int) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    # Beyond so many digits Python itself refuses.
    if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) < least:
        raise UsageError(f"{name}={text[:40]!r}", f"an integer of at least {least}", _ADVICE)
    return int(text)


def _local_place(environ: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
    local_rank = _integer(environ, "LOCAL_RANK", 0)
    local_size = _integer(environ, "LOCAL_WORLD_SIZE", 1)
    if local_size is not None and local_size > size:
        raise UsageError(f"LOCAL_WORLD_SIZE={local_size} with WORLD_SIZE={size}", "a part of all", _ADVICE)
    if local_size is None:
        local_size = size
    if local_rank is None:
        local_rank = rank % local_size
    if local_rank >= local_size:
        raise UsageError(
            f"LOCAL_RANK={local_rank} with {local_size} ranks on this machine",
            f"local ranks go from 0 to {local_size - 1}",
            _ADVICE,
        )
    return local_rank, local_size


def _device(environ: Mapping[str, str], kind: str, local_rank: int, local_size: int) -> str:
    if kind != "cuda":
        return kind
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return f"cuda:{local_rank}"
    count = len([name for name in visible.split(",") if name.strip()])
    if count == 1 and local_size > 1:
        return "cuda:0"  # some launchers show each rank its own GPU only
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no GPU",
            f"CUDA_VISIBLE_DEVICES={visible} shows {count} for {local_size} ranks",
            "start fewer ranks, or use devices='cpu'",
        )
    return f"cuda:{local_rank}"


def _threads(environ: Mapping[str, str], local_size: int, cores: int) -> int:
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdigit() and int(given) > 0:
        return int(given)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, (cores or usable) // local_size))
