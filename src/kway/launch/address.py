"""Where ranks of one machine meet, and what their environment says: loopback, a port that is held, no DNS."""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from kway.errors import UsageError
from kway.launch import mpi

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.1
# Of Linux's sockios.h: asks for the address of an interface.
_SIOCGIFADDR = 0x8915
# Where it is set, HIP does not read CUDA_VISIBLE_DEVICES.
_HIP = "HIP_VISIBLE_DEVICES"

# What another launcher left in the environment describes its ranks, not ours.
_OTHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "KWAY_INIT_METHOD",
)


def listening_socket() -> socket.socket:
    """Bind a port of the loopback interface and keep it: between choice and use nobody else can take it."""
    listener = socket.socket()
    try:
        listener.bind((LOOPBACK, 0))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def reserved_port(host: str = LOOPBACK, port: int = 0) -> Iterator[int]:
    """Hold a port of this machine for a rank of another process, which may listen on it meanwhile; 0 takes a free one.

    Bound but not listening, with the address marked as reusable: the system gives the port to nobody who does
    not ask for it by number, as rank 0 does. Raises ``UsageError`` where ``host``:``port`` cannot be had here.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        holder = socket.socket(family)
    except (OSError, UnicodeError) as error:
        raise _not_here(host, port, error) from None
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(place)
        except OSError as error:
            raise _not_here(host, port, error) from None
        yield holder.getsockname()[1]


def _not_here(host: str, port: int, error: Exception) -> UsageError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return UsageError(
        f"ranks of this machine cannot meet at {host}:{port} ({reason})",
        "it must be an address of this machine, and a port that nobody uses",
        f"name {LOOPBACK} and another port",
    )


def loopback_interface() -> str | None:
    """Name the network interface of this machine that reaches only itself."""
    return next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)


def addresses_of_interfaces() -> list[str]:
    """Return the IPv4 address of each network interface that has one, as Linux tells it; nothing elsewhere."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else []:
            with contextlib.suppress(OSError):
                told = fcntl.ioctl(asks, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(told[20:24]))
    return found


def check_interface(environ: Mapping[str, str], backend: str) -> None:
    """Raise ``UsageError`` where ``backend`` is told to use a network interface that this machine does not have.

    For Gloo. What NCCL takes are patterns, and it names its variable itself.
    """
    if backend != "gloo":
        return
    there = [name for _, name in socket.if_nameindex()]
    for name in environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in there:
            raise UsageError(
                f"GLOO_SOCKET_IFNAME names {name!r}",
                f"this machine has the network interfaces {', '.join(there)}",
                "name one of them, or unset it",
            )


def check_name(name: str, shown: str) -> None:
    """Raise ``UsageError`` where ``name`` is none that this machine knows. ``shown``: as it was given."""
    try:
        socket.getaddrinfo(name, None)
    except (socket.gaierror, UnicodeError) as error:
        # A name service that does not answer may do so soon.
        if getattr(error, "errno", None) != socket.EAI_AGAIN:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"{shown} cannot be resolved ({reason})",
                "it is where rank 0 runs",
                "name that machine by its address, or by a name that all ranks can look up",
            ) from None


def wait_for_listener(host: str, port: int, timeout: float) -> None:
    """Return when somebody listens at ``host``:``port``. Raises ``OSError``, the last reason, after ``timeout`` s."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(left, _LOOK_S)):
                return
        except OSError:
            if left <= _LOOK_S:
                raise
        time.sleep(_LOOK_S)


def device_of_rank(device: str, rank: int) -> str:
    """Name the device as the rank itself sees it: of the chosen GPUs, in order, its own."""
    return f"cuda:{rank}" if device.startswith("cuda") else device


def environment(
    devices: Sequence[str], threads: int | None, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Make the environment that all ranks share, from that of this process.

    Raises ``UsageError`` for devices that cannot form ranks: none, unknown, mixed, or listed twice.
    """
    if not devices:
        raise UsageError("no devices", "ranks need at least one", 'name some, for example "cpu:2"')
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise UsageError(f"devices {', '.join(devices)}", "ranks are all on cpu or all on cuda:I")
    made = {
        name: value
        for name, value in inherited.items()
        if name not in _OTHERS and not name.startswith(("TORCHELASTIC_", *mpi.PREFIXES))
    }
    # The store and the back ends look up this machine's own name unless told which interface to use.
    loopback = loopback_interface()
    if loopback is not None:
        made.setdefault("GLOO_SOCKET_IFNAME", loopback)
        made.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if threads is not None:
        made["OMP_NUM_THREADS"] = str(threads)
    # Ranks see what was chosen, all of it: direct copies between GPUs need both ends visible to each rank.
    chosen = _visible(devices, inherited.get("CUDA_VISIBLE_DEVICES")) if "cuda" in kinds else ""
    made["CUDA_VISIBLE_DEVICES"] = chosen
    if _HIP in inherited:
        made[_HIP] = _visible_to_hip(devices, inherited[_HIP]) if "cuda" in kinds else ""
    return made


def _visible_to_hip(devices: Sequence[str], visible: str) -> str:
    """Say the same to builds for ROCm; as it was where it names too few GPUs, and so is not what counts here."""
    names = visible.split(",")
    indices = [int(device.partition(":")[2] or "0") for device in devices]
    return ",".join(names[index] for index in indices) if max(indices) < len(names) else visible


def _visible(devices: Sequence[str], visible: str | None) -> str:
    """Say in the driver's terms which GPUs ranks see, where this process sees ``visible`` (``None``: all)."""
    indices = [device.partition(":")[2] or "0" for device in devices]
    if len(set(indices)) < len(indices):
        raise UsageError(f"devices {', '.join(devices)}", "each GPU holds one rank", "list each GPU once")
    if visible is None:
        return ",".join(indices)
    names = [name.strip() for name in visible.split(",")]
    for device, index in zip(devices, indices, strict=True):
        if int(index) >= len(names):
            raise UsageError(f"no device {device}", f"CUDA_VISIBLE_DEVICES={visible} shows {len(names)}")
    return ",".join(names[int(index)] for index in indices)


def rank_variables(rank: int, size: int, port: int, host: str = LOOPBACK) -> dict[str, str]:
    """Make the variables by which a rank, and any library in it, finds its place."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def python_path() -> tuple[str, ...]:
    """Return where this process finds modules, for ranks: relative entries stay relative to the same folder."""
    return tuple(entry for entry in sys.path if isinstance(entry, str))
