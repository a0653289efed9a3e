"""Ranks that another launcher started: torchrun, or anything that sets ``RANK`` and ``WORLD_SIZE``."""

import atexit
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

from kway.backends import backend_of
from kway.errors import KwayError, UsageError
from kway.launch.address import check_interface, check_name, loopback_interface, wait_for_listener
from kway.launch.built import usable_backend
from kway.launch.status import watched
from kway.world import World

_ADVICE = "start the ranks with torchrun or kway launch, or unset RANK and WORLD_SIZE"
_LET_GO_S = 0.05
_LAST_PORT = 65535
_FOR_EVER = timedelta(days=365)
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def check_outside(environ: Mapping[str, str] | None = None) -> None:
    """Raise ``UsageError`` inside one of several ranks of torchrun or kway, where nobody wants more of them started."""
    environ = os.environ if environ is None else environ
    size = _integer(environ, "WORLD_SIZE", 1)
    if size is not None and size > 1:
        raise UsageError(
            f"this is rank {environ.get('RANK') or '?'} of {size} already (RANK, WORLD_SIZE)",
            "each of them would start the script anew, on devices of its own",
            "start the script itself with what started these ranks, or unset RANK and WORLD_SIZE",
        )


def from_environment(
    environ: Mapping[str, str] | None = None, threads: int | None = None, device: str = "cpu"
) -> World | None:
    """Read this process's place from ``RANK`` and ``WORLD_SIZE``; ``None`` where neither is set.

    ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` are optional: without them all ranks count as ranks of one machine.
    ``device``: ``cpu`` or ``cuda``, of which the rank gets the one with its local rank. ``threads``: intra-op
    CPU threads; ``None`` takes ``OMP_NUM_THREADS``, or this rank's part of the processors. Raises ``UsageError``
    for variables that contradict each other, are no integers, or where more than one rank has no
    ``MASTER_ADDR`` and ``MASTER_PORT`` to meet at.
    """
    environ = os.environ if environ is None else environ
    rank, size = _integer(environ, "RANK", 0), _integer(environ, "WORLD_SIZE", 1)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise UsageError(f"{there} is set, {missing} is not", "a rank needs both", _ADVICE)
    if rank >= size:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={size}", f"ranks go from 0 to {size - 1}", _ADVICE)
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise UsageError(f"{name} is not set", f"{size} ranks need an address to meet at", _ADVICE)
        port = _integer(environ, "MASTER_PORT", 0)
        if port is not None and port > _LAST_PORT:
            raise UsageError(f"MASTER_PORT={port}", f"ports go to {_LAST_PORT}", _ADVICE)
    local_rank, local_size = _local_place(environ, rank, size)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=_device(environ, device, local_rank, local_size),
        backend=backend_of([device]),
        threads=threads or _threads(environ, local_size),
        origin="env",
    )


def _integer(environ: Mapping[str, str], name: str, least: int) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise UsageError(f"{name}={text!r}", f"an integer of at least {least}", _ADVICE)
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


def _threads(environ: Mapping[str, str], local_size: int) -> int:
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdigit() and int(given) > 0:
        return int(given)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // local_size)


def join(world: World, timeout: timedelta = timedelta(seconds=60), patient: bool = False) -> None:
    """Make this process a member of the default process group, which stays for the life of the process.

    A group that the user has initialised is used as it is. ``timeout`` is for finding the other ranks, not for
    the collectives that follow; these have no time limit where ``patient``, or where kway's own parent watches.
    Raises ``KwayError`` that names the address where they cannot be found, and ``UsageError`` where an existing
    group, or the GPUs, are not those of ``world``, and where ``MASTER_ADDR`` or ``GLOO_SOCKET_IFNAME`` names what is
    not there.
    """
    import torch
    import torch.distributed as dist

    if world.device.startswith("cuda"):
        count = torch.cuda.device_count()
        if (torch.device(world.device).index or 0) >= count:
            raise UsageError(f"rank {world.rank} has no {world.device}", f"torch sees {count} GPUs here")
        torch.cuda.set_device(torch.device(world.device))
    if dist.is_initialized():
        place = dist.get_rank(), dist.get_world_size()
        if place != (world.rank, world.size):
            raise UsageError(
                f"the process group says rank {place[0]} of {place[1]}",
                f"RANK and WORLD_SIZE say rank {world.rank} of {world.size}",
            )
        return
    check_interface(os.environ, world.backend)
    if world.size > 1:
        check_name(os.environ)
    if world.size == world.local_size or os.environ.get("MASTER_ADDR") in _THIS_MACHINE:
        _use_loopback()
    dist.init_process_group(
        usable_backend(world.device),
        store=_store(world, timeout),
        rank=world.rank,
        world_size=world.size,
        timeout=_FOR_EVER if patient or watched() else None,
        device_id=torch.device(world.device) if world.backend == "nccl" else None,
    )
    atexit.register(_leave)


def _use_loopback() -> None:
    """Spare the back ends the look-up of this machine's own name, which need not resolve."""
    name = loopback_interface()
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _store(world: World, timeout: timedelta) -> Any:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if world.size == 1:
        stores: Any = import_module("torch.distributed")
        return stores.HashStore()
    try:
        if world.rank:
            # Found out here, and not by torch's own client: that one says so with pages of frames.
            wait_for_listener(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout.total_seconds()
            )
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
        return PrefixStore("kway", store)
    except (RuntimeError, OSError, ValueError) as error:
        raise KwayError(
            f"rank {world.rank} of {world.size} found no meeting point at {address}",
            str(error).strip().partition("\n")[0].rstrip("."),
            f"check MASTER_ADDR and MASTER_PORT, and that {'rank 0 runs' if world.rank else 'all ranks run'}",
        ) from None


def _leave() -> None:
    import torch.distributed as dist

    # After an error, peers may be inside a collective that never ends: do not wait for them.
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
        # Gloo's threads outlive the group. One that still has to drop a tensor of the last collective needs the
        # interpreter for it, and aborts the process where it is being taken down: let them have it first.
        time.sleep(_LET_GO_S)
