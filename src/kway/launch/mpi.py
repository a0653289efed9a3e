"""Ranks that ``mpirun`` started: what Open MPI, and Hydra (of MPICH and Intel MPI), say in the environment of each.

Nothing of MPI itself is used. What ranks of one machine have in common without a word between them is the process that
started them: it names the place where they meet.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kway.errors import UsageError
from kway.launch.temporary import check_temporary

# What each says of rank, size, local rank and local size; the last two may be missing.
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_AS_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The beginnings of all that MPI gives a rank, and that would mislead the ranks which kway starts in it.
PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "HYDI_")
# What differs between the ranks of two jobs, where one of them started the other.
_TELLING = (*_OPEN_MPI, *_HYDRA, "PMIX_NAMESPACE", "PMI_FD")


def place_by_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this process's place by the names that torchrun gives it; nothing where no ``mpirun`` started several.

    ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` that are set already stay as they are. Raises ``UsageError`` where
    one of rank and size is missing: each process would take itself for the only one.
    """
    for names in (_OPEN_MPI, _HYDRA):
        rank, size = (environ.get(name, "").strip() for name in names[:2])
        if not rank and not size:
            continue
        if not rank or not size:
            there, missing = names[:2] if rank else (names[1], names[0])
            raise UsageError(
                f"{there} is set, {missing} is not",
                "ranks of mpirun have both",
                "set RANK and WORLD_SIZE, or unset it",
            )
        if size == "1":
            return {}
        said = zip(_AS_TORCHRUN, names, strict=True)
        return {
            ours: value
            for ours, theirs in said
            if (value := environ.get(ours, "").strip() or environ.get(theirs, "").strip())
        }
    return {}


def meeting_file(environ: Mapping[str, str]) -> Path:
    """Name the file by which the ranks of one ``mpirun`` on this machine find each other.

    Named after the process that started them, and the moment of its own start: no other job has that name, also
    where an earlier one left its file. Raises ``UsageError`` where there is no folder for temporary files.
    """
    check_temporary()
    pid = launcher(environ)
    return Path(tempfile.gettempdir()) / f"kway-{os.getuid()}-{pid}-{_started(pid)}.meet"


def launcher(environ: Mapping[str, str], pid: int | None = None) -> int:
    """Return the id of the process that started this rank (or process ``pid``).

    That is the nearest ancestor which is not of the rank itself: shells and wrappers in between have its variables.
    Without ``/proc`` it is the parent.
    """
    pid = os.getpid() if pid is None else pid
    mine = {name: environ[name].encode() for name in _TELLING if name in environ}
    while True:
        stat = _stat(pid)
        parent = int(stat[1]) if stat else os.getppid()
        if parent <= 1 or not stat or not _has(parent, mine):
            return parent
        pid = parent


def bound_within(environ: Mapping[str, str]) -> int:
    """Return how many logical processors the ranks of this machine share, where this one is bound to a part; else 0.

    Open MPI binds each rank, to a core or to a socket that several share, by itself; its own process is not bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 0
    try:
        whole = len(os.sched_getaffinity(launcher(environ)))
    except OSError:
        return 0
    return whole if whole > len(os.sched_getaffinity(0)) else 0


def _has(pid: int, variables: Mapping[str, bytes]) -> bool:
    """Whether a process was started with these variables; not where it is somebody else's."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    theirs = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
    return all(theirs.get(name.encode()) == value for name, value in variables.items())


def _started(pid: int) -> str:
    """Return when a process started, in ticks since this machine did."""
    stat = _stat(pid)
    return stat[19].decode() if stat else "0"


def _stat(pid: int) -> list[bytes]:
    """Return what the kernel says of a process, from its state on; nothing where there is no ``/proc``."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
