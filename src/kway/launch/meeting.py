"""How ranks of another launcher find each other: a store that rank 0 serves, at an address or by way of a file.

With a file, rank 0 listens on a port that is free and writes where into the file; the others try what they read until
the store there knows the same word. A file that an earlier job left is therefore no trap: it leads nowhere, and is
written over. Once all ranks are there it is removed.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from kway.errors import KwayError, UsageError
from kway.launch.address import LOOPBACK, addresses_of_interfaces, wait_for_listener
from kway.launch.init_method import SIGN, InitMethod, check_file
from kway.launch.limit import OutOfTimeError, within
from kway.units import counted
from kway.world import World

T = TypeVar("T")

_LOOK_S = 0.05
_TRY_S = 2.0
# By how much longer than torch's own limit kway's is, where there is one.
_SLACK_S = 2.0
# An address of no machine (RFC 5737): to name it sends nothing, and shows which address this machine would send from.
_ELSEWHERE = ("192.0.2.1", 9)


@dataclass(frozen=True)
class Met:
    """The store of all ranks, and whether they are all on this machine."""

    store: Any
    one_machine: bool


def meet(method: InitMethod, world: World, timeout: timedelta) -> Met:
    """Find the other ranks of ``world`` at ``method``, which is not ``env://``. All of them call it.

    Raises ``UsageError`` for a file or a port that cannot be had, and where two processes say that they are the same
    rank or ranks differ about how many they are; ``KwayError``, which names who is missing, after ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if method.path is not None:
        check_file(method.path)
    try:
        if world.rank:
            store = _found(method, deadline, timeout)
            return Met(store, _all_there(store, method, world, deadline))
        store, word = _served(method, timeout)
        try:
            return Met(store, _all_there(store, method, world, deadline))
        finally:
            # Also where the others did not come.
            _remove(method, word)
    except (RuntimeError, OSError, ValueError) as error:
        raise KwayError(
            f"rank {world.rank} of {world.size} found no meeting point at {method}",
            str(error).strip().partition("\n")[0].rstrip("."),
            f"check that {'rank 0 runs' if world.rank else 'all ranks run'}, and that all ranks name the same place"
            + (", on one machine: several need KWAY_INIT_METHOD" if method.own else ""),
        ) from None


def _served(method: InitMethod, timeout: timedelta) -> tuple[Any, str]:
    """Listen as rank 0, and write into the file where. Return the store, and the word that both know."""
    listener = _listener(method)
    port = listener.getsockname()[1]
    host = "::1" if listener.family is socket.AF_INET6 else LOOPBACK
    # The store closes the descriptor at its end.
    store = _store(host, port, timeout, listener.detach())
    word = secrets.token_hex(16)
    if method.path is not None:
        store.set("word", word)
        _write(
            method.path, {"port": port, "word": word, "machine": machine(), "hosts": _own_addresses(method)}
        )
    return store, word


def _remove(method: InitMethod, word: str) -> None:
    """Remove the file, if it is still the one with this word: rank 0 of another job may have written over it."""
    if method.path is not None and (said := _read(method)) is not None and said["word"] == word:
        method.path.unlink(missing_ok=True)


def _listener(method: InitMethod) -> socket.socket:
    """Bind the port. All interfaces, for other machines, but where only this one is meant."""
    family, host = socket.AF_INET, LOOPBACK if method.own else ""
    if method.host:
        family, _, _, _, address = socket.getaddrinfo(method.host, method.port, type=socket.SOCK_STREAM)[0]
        host = str(address[0]) if str(address[0]) in (LOOPBACK, "::1") else ""
    try:
        return socket.create_server((host, method.port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"port {method.port} cannot be had for {method}",
            (error.strerror or str(error)).lower(),
            "name a port that is free on the machine of rank 0",
        ) from None


def _found(method: InitMethod, deadline: float, timeout: timedelta) -> Any:
    """Return the store that rank 0 serves. Raises ``OSError`` where there is none in time."""
    if method.path is None:
        # Looked for here, and not by torch's own client: that one says so with pages of frames.
        wait_for_listener(method.host, method.port, deadline - time.monotonic())
        return _client(method.host, method.port, timeout, deadline - time.monotonic())
    last: Exception | None = None
    while time.monotonic() < deadline:
        said = _read(method)
        try:
            if said is not None and (store := _known(said, timeout)) is not None:
                return store
        except (RuntimeError, OSError) as error:
            # Who wrote it is gone, or only begins.
            last = error
        time.sleep(_LOOK_S)
    raise OSError(f"rank 0 has not written there{'' if last is None else f', or cannot be reached ({last})'}")


def _known(said: dict[str, Any], timeout: timedelta) -> Any:
    """Return the store that a file leads to; ``None`` where it is another one.

    Raises ``OSError`` or ``RuntimeError`` where it is at none of the hosts and one did not answer as a store does.
    """
    hosts = [LOOPBACK] if said["machine"] == machine() else said["hosts"]
    last: Exception | None = None
    for host in hosts:
        try:
            wait_for_listener(host, said["port"], _TRY_S)
            store = _client(host, said["port"], timedelta(seconds=_TRY_S), _TRY_S)
            if store.check(["word"]) and store.get("word") == said["word"].encode():
                store.set_timeout(timeout)
                return store
        except (RuntimeError, OSError) as error:
            # From here the same address may be another machine, where something else listens.
            last = error
    if last is not None:
        raise last
    return None


def _all_there(store: Any, method: InitMethod, world: World, deadline: float) -> bool:
    """Wait for all ranks, and return whether they are on one machine."""
    if store.add(f"come/{world.rank}", 1) > 1:
        raise UsageError(
            f"two processes say that they are rank {world.rank} of {world.size} at {method}",
            "ranks differ",
            "name another meeting point for another job",
        )
    # Rank 0 first: what it says of the size counts, and the others need not wait in vain.
    store.set(f"rank/{world.rank}", json.dumps([world.size, machine()]))
    machines = {machine()}
    for rank in range(world.size):
        left = deadline - time.monotonic()
        try:
            _wait(store, f"rank/{rank}", left)
        except RuntimeError:
            missing = [each for each in range(world.size) if not store.check([f"rank/{each}"])]
            if not missing:
                raise
            raise KwayError(
                f"rank {world.rank} of {world.size} waited in vain at {method}",
                f"{counted(len(missing), 'rank')} did not come: {', '.join(map(str, missing[:8]))}"
                + (", ..." if len(missing) > 8 else ""),
                "look at what they say themselves",
            ) from None
        size, where = json.loads(store.get(f"rank/{rank}"))
        if size != world.size:
            raise UsageError(
                f"rank {rank} says that there are {size} ranks, rank {world.rank} that there are {world.size}",
                f"they met at {method}",
                "start all ranks alike, and name another meeting point for another job",
            )
        machines.add(where)
    # Nobody leaves while somebody still looks: rank 0 may be through with all of its work soon.
    if store.add("seen", 1) == world.size:
        store.set("all seen", "")
    _wait(store, "all seen", deadline - time.monotonic())
    return len(machines) == 1


def _client(host: str, port: int, timeout: timedelta, seconds: float) -> Any:
    """Return a way to the store at an address where somebody listens. ``timeout``: of what is asked of it later.

    Raises ``OSError`` where it does not answer in about ``seconds``: torch's own client would wait for ever.
    """
    return answered(host, port, seconds, lambda: _store(host, port, timeout))


def answered(host: str, port: int | str, seconds: float, ask: Callable[[], T]) -> T:
    """Return what ``ask`` does, which talks to a store and has a limit of ``seconds`` itself, if it has one.

    Raises ``OSError`` where nothing comes back until a little later.
    """
    try:
        return within(max(seconds, _LOOK_S) + _SLACK_S, ask)
    except OutOfTimeError:
        raise OSError(f"what listens at {host}:{port} does not answer as rank 0 does") from None


def _wait(store: Any, key: str, seconds: float) -> None:
    """Wait until ``key`` is there. Signals are heard meanwhile.

    Raises ``RuntimeError`` after ``seconds``, and ``OSError`` where the store does not even say so.
    """
    limit = max(seconds, _LOOK_S)
    try:
        within(limit + _SLACK_S, lambda: store.wait([key], timedelta(seconds=limit)))
    except OutOfTimeError:
        raise OSError("the store that rank 0 serves does not answer any more") from None


def _store(host: str, port: int, timeout: timedelta, descriptor: int | None = None) -> Any:
    stores: Any = import_module("torch.distributed")
    return stores.TCPStore(
        host,
        port,
        is_master=descriptor is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def _write(path: Path, said: dict[str, Any]) -> None:
    """Write the file as a whole, for its owner only: others see it complete or not at all."""
    text = SIGN.decode() + "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in said.items())
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        part.touch(0o600, exist_ok=False)
        part.write_text(text + "}\n", encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _read(method: InitMethod) -> dict[str, Any] | None:
    """Return what rank 0 wrote; ``None`` where it has not, and for kway's own file where somebody else did."""
    assert method.path is not None
    with suppress(OSError, ValueError), method.path.open("rb") as file:
        if method.own and os.fstat(file.fileno()).st_uid != os.geteuid():
            return None
        said = json.loads(file.read())
        if isinstance(said, dict) and {"port", "word", "machine", "hosts"} <= said.keys():
            return said
    return None


def machine() -> str:
    """Return what processes have in common that reach each other by loopback: the machine, and its network."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
    return socket.gethostname()


def _own_addresses(method: InitMethod) -> list[str]:
    """Return by what names other machines may reach this one, the likeliest first."""
    if method.own:
        return [LOOPBACK]
    found: dict[str, None] = {}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        found[probe.getsockname()[0]] = None
    name = socket.gethostname()
    with suppress(OSError):
        for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
            found[str(entry[4][0])] = None
    # Clusters have networks that no route leads out of, and names that stand for loopback.
    found.update(dict.fromkeys(addresses_of_interfaces()))
    return [*(address for address in found if not address.startswith("127.")), name]
