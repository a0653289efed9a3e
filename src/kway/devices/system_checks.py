"""What the doctor makes of the system around torch: shared memory, limits, loopback, names, processors, folders."""

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kway.devices.cgroup import process_limit
from kway.devices.checks import FAIL, WARN, Check, good
from kway.devices.cpu import ROOT
from kway.devices.limit_checks import locked_memory, open_files, tasks
from kway.devices.spelling import misspelled
from kway.records import Cluster
from kway.units import bytes_text

_MIB = 1 << 20
LOOPBACK = "127.0.0.1"
# A batch or two of small images; several batches of large ones for a few workers.
_LEAST_SHARED, _ENOUGH_SHARED = 16 * _MIB, 1024 * _MIB
_ENOUGH_TEMPORARY = 256 * _MIB
_SLOW_S, _GIVEN_UP_S = 1.0, 10.0


def checks(cluster: Cluster, environ: Mapping[str, str], root: Path = ROOT) -> Iterator[Check]:
    """Yield the checks of this machine."""
    ranks = max(len(cluster.gpus), int(cluster.cpu["usable"]))
    yield shared_memory(root / "dev/shm")
    yield temporary_files()
    yield open_files(ranks)
    yield locked_memory(any(port["state"] == "ACTIVE" for port in cluster.infiniband))
    yield tasks(ranks, process_limit(root))
    yield loopback()
    yield host_name()
    yield processors(cluster.cpu, environ)
    yield variables(environ)


def shared_memory(folder: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """Judge the room through which loader workers, and GPUs without direct access, hand on what they have."""
    name, do = "shared memory", "make it larger: docker run --shm-size=8g, or --ipc=host"
    try:
        total, _, free = usage(folder)
    except OSError:
        return Check(
            name, WARN, f"{folder} is not there", "run without loader workers, or mount a tmpfs there"
        )
    if not os.access(folder, os.W_OK):
        return Check(name, FAIL, f"{folder} cannot be written", f"chmod 1777 {folder}")
    found = f"{bytes_text(free)} of {bytes_text(total)} in {folder} are free"
    if free < _ENOUGH_SHARED:
        return Check(name, FAIL if free < _LEAST_SHARED else WARN, found, do)
    return good(name, found)


def temporary_files(find: Callable[[], str] = tempfile.gettempdir) -> Check:
    """Judge the folder where ranks meet, and find what they are to do."""
    name, do = "temporary files", "set TMPDIR to a folder with room"
    try:
        folder = find()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(name, FAIL, str(error), do)
    found = f"{bytes_text(free)} free in {folder}"
    return good(name, found) if free >= _ENOUGH_TEMPORARY else Check(name, WARN, found, do)


def loopback(address: str = LOOPBACK) -> Check:
    """Judge whether processes of this machine reach each other at a free port, by doing so."""
    name = "loopback"
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout=_SLOW_S) as caller:
                server.settimeout(_SLOW_S)
                answerer, _ = server.accept()
                with answerer:
                    answerer.sendall(b"kway")
                    caller.settimeout(_SLOW_S)
                    heard = caller.recv(4)
    except OSError as error:
        do = "bring the interface up (ip link set lo up), and let no firewall filter it"
        return Check(name, FAIL, f"no connection at {address}: {error}", do)
    if not heard:
        return Check(
            name, FAIL, f"port {port} of {address} answers nothing", "let no firewall filter loopback"
        )
    return good(name, f"port {port} of {address} was free and answers")


def host_name(
    own: Callable[[], str] = socket.gethostname,
    resolve: Callable[..., Any] = socket.getaddrinfo,
    patience: float = _GIVEN_UP_S,
) -> Check:
    """Judge whether the machine's own name resolves, which other launchers and several machines need; kway does not."""
    name, host = "host name", own()
    do = f"add it to /etc/hosts: 127.0.1.1 {host}"
    problems: list[str] = []

    def look_up() -> None:
        try:
            resolve(host, None)
        except (OSError, UnicodeError) as error:
            problems.append(getattr(error, "strerror", None) or str(error))

    begun = time.monotonic()
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(patience)
    seconds = time.monotonic() - begun
    if thread.is_alive():
        return Check(name, WARN, f"{host!r} is looked up for more than {patience:g} s", do)
    if problems:
        return Check(name, WARN, f"{host!r} does not resolve ({problems[0]})", do)
    if seconds > _SLOW_S:
        return Check(name, WARN, f"{host!r} takes {seconds:.1f} s to resolve", do)
    return good(name, f"{host!r} resolves")


def processors(cpu: Mapping[str, Any], environ: Mapping[str, str]) -> Check:
    """Judge what affinity, control group and OMP_NUM_THREADS leave of the processors."""
    name, usable = "processors", int(cpu["usable"])
    found = f"{usable} of {cpu['logical']} usable"
    threads = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if threads.isdigit() and int(threads) > usable:
        return Check(
            name, WARN, f"{found}, OMP_NUM_THREADS={threads}", f"set it to {usable} at most, or unset it"
        )
    if cpu["quota"] is not None and cpu["quota"] < cpu["affinity"]:
        text = f"{found}: the control group gives the time of {cpu['quota']:g}"
        return Check(
            name, WARN, text, "more only where others may have less: docker run --cpus, or the job's request"
        )
    return good(name, found)


def variables(environ: Mapping[str, str]) -> Check:
    """Judge whether an environment variable looks like a misspelling of one that matters."""
    lines = misspelled(environ)
    if lines:
        return Check("environment", WARN, "; ".join(lines), "rename or unset it")
    return good("environment", "no variable looks misspelled")
