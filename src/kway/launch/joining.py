"""A rank of another launcher becomes a member of the default process group."""

import atexit
import os
import sys
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

from kway.errors import KwayError, UsageError
from kway.launch.address import check_interface, check_name, loopback_interface, wait_for_listener
from kway.launch.built import usable_backend
from kway.launch.in_time import ends_in_time
from kway.launch.init_method import ENV
from kway.launch.interrupt import signals_raise
from kway.launch.meeting import answered, meet
from kway.launch.status import watched
from kway.launch.torchrun import meeting_point
from kway.world import World

_LET_GO_S = 0.05
_FOR_EVER = timedelta(days=365)
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def join(world: World, timeout: timedelta = timedelta(seconds=60), patient: bool = False) -> None:
    """Make this process a member of the default process group, which stays for the life of the process.

    A group that the user has initialised is used as it is. ``timeout`` is for finding the other ranks, not for
    the collectives that follow; these have no time limit where ``patient``, or where kway's own parent watches.
    Raises ``KwayError`` that names the address where they cannot be found, and ``UsageError`` where an existing
    group, its back end, or the GPUs, are not those of ``world``, and where ``MASTER_ADDR``, ``KWAY_INIT_METHOD`` or
    ``GLOO_SOCKET_IFNAME`` names what is not there.
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
        _check_backend(world)
        return
    check_interface(os.environ, world.backend)
    # Raised, and not the end at once: what rank 0 made for the others to find it is removed.
    with signals_raise(), ends_in_time(world):
        store, one_machine = _store(world, timeout)
        if one_machine:
            _use_loopback()
        dist.init_process_group(
            usable_backend(world.device),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=_FOR_EVER if patient or watched() else None,
            device_id=torch.device(world.device) if world.backend == "nccl" else None,
        )
    atexit.register(_leave)


def _check_backend(world: World) -> None:
    """Raise ``UsageError`` where the group that is there can send nothing from the device of ``world``."""
    from torch.distributed.distributed_c10d import get_backend_config

    kind, config = world.device.partition(":")[0], str(get_backend_config())
    if f"{kind}:" not in config:
        raise UsageError(
            f"the process group is for {config}",
            f"this rank computes on {world.device}",
            f"make it with init_process_group({world.backend!r}, ...), or choose other devices",
        )


def _use_loopback() -> None:
    """Spare the back ends the look-up of this machine's own name, which need not resolve."""
    name = loopback_interface()
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _store(world: World, timeout: timedelta) -> tuple[Any, bool]:
    """Return a store that all ranks share, and whether they are all on this machine."""
    from torch.distributed.distributed_c10d import PrefixStore

    if world.size == 1:
        stores: Any = import_module("torch.distributed")
        return stores.HashStore(), True
    method = meeting_point(os.environ, world.size, world.local_size)
    if str(method) != ENV:
        if method.host:
            check_name(method.host, str(method))
        met = meet(method, world, timeout)
        return PrefixStore("kway", met.store), met.one_machine
    host = os.environ.get("MASTER_ADDR", "")
    check_name(host, f"MASTER_ADDR={host!r}")
    one_machine = world.size == world.local_size or host in _THIS_MACHINE
    return PrefixStore("kway", _env_store(world, timeout)), one_machine


def _env_store(world: World, timeout: timedelta) -> Any:
    from torch.distributed.rendezvous import rendezvous

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    address, seconds = f"{host}:{port}", timeout.total_seconds()
    try:
        if world.rank:
            # Found out here, and not by torch's own client: that one says so with pages of frames.
            wait_for_listener(host, int(port), seconds)
        found = rendezvous("env://", world.rank, world.size, timeout=timeout)
        return answered(host, port, seconds, lambda: next(found)[0])
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
