"""Ranks and commands that are forked from a process which has imported torch, not started: 4 s of CPU less each.

They are children of the tests' process and have descriptors, session and environment as if started. What differs:
modules are there that a task may not have imported, and ``/proc`` shows the command line of the process they were
forked from. Where that is the point of a test, ranks and commands are started, and so they are where forking does not
work. ``tests/zygote.py`` runs this file, too, for the ranks of commands.
"""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self
from unittest import mock

from kway.launch import address, crew
from kway.launch.crew import Crew
from kway.launch.local import Ranks
from kway.launch.process import SOURCES, RankProcess

# Two, as the order in which names leave a set is that of the process it was forked from: ranks of one order only
# would hide collectives whose order follows from it.
_COUNT = 2
_ANSWER_S = 60
_PR_SET_CHILD_SUBREAPER = 36
# A file name in brackets, as that of ``-c``: the launcher leaves such frames out of what it shows.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[2]); names = {'__name__': 'zygote'}; "
    "exec(compile(open(sys.argv[3]).read(), '<zygote>', 'exec'), names); names['serve'](int(sys.argv[1]))()"
)
# What is forked writes its environment where that of the process stands which it was forked from.
_ROOM = {"KWAY_TEST_ROOM": "." * (1 << 16)}
# What Python and libraries read once, when they start.
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "MPL",
)
_SET_LATER = ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
_SERVER = "from multiprocessing.forkserver import main"
# A test may start ranks from several threads.
_ONE_AT_A_TIME = threading.Lock()


class Forker:
    """This end of the wire to a process that forks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(_ANSWER_S)

    def fork(self, request: Any, fds: Sequence[int]) -> int:
        """Return the process id of a new child of this process. Raises ``OSError``, and must not be asked again then:
        what comes late would be taken for the next answer.
        """
        with _ONE_AT_A_TIME, adopting():
            socket.send_fds(self._sock, [json.dumps(request).encode()], fds)
            return int(self._take())

    def starts_as(self, environment: Mapping[str, str]) -> bool:
        """Whether what is started with ``environment`` begins as what is forked does: such a one is what asks."""
        return True

    def close(self) -> str:
        """Let go of it. Returns what it printed, as far as that is known."""
        self._sock.close()
        return ""

    def _take(self) -> str:
        if not (said := self._sock.recv(100).decode().strip()):
            raise OSError(f"the process that ranks are forked from said nothing {self._ended()}")
        return said

    def _ended(self) -> str:
        return ""


class Zygote(Forker):
    """Starts the process that forks. It ends when this one does, or with ``close``."""

    def __init__(self) -> None:
        # Packets: a request and its descriptors arrive together.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        self._ready = False
        # What libraries read from the environment when they are imported is that of a rank.
        self._environment = address.environment(["cpu"], 1) | _ROOM
        # It outlives the test that first needed it.
        self._environment.pop("KWAY_TEST_MARK", None)
        with theirs:
            file = str(Path(__file__).with_name("zygote.py"))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE, str(theirs.fileno()), SOURCES, file],
                stdin=subprocess.DEVNULL,
                # Pipes, as a rank has: Python asks what its streams are when it starts.
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it can fork. Raises ``OSError`` where it cannot."""
        if not self._ready:
            if (said := self._take()) != "ready":
                raise OSError(f"the process that ranks are forked from said {said!r}")
            self._ready = True

    def starts_as(self, environment: Mapping[str, str]) -> bool:
        """Whether what is started with ``environment`` begins as what is forked does."""
        return _read_at_start(environment) == _read_at_start(self._environment)

    def close(self) -> str:
        """End it, whatever it is at, and return what it printed, the first time."""
        self._sock.close()
        self._process.kill()
        return self._ended()

    def _ended(self) -> str:
        """Wait for the end of the process and return what it printed, the first time."""
        stdout = self._process.stdout
        return "" if stdout is None or stdout.closed else self._process.communicate()[0].decode()


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _SET_LATER
    }


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Be the parent of descendants whose own parent ends meanwhile. Raises ``OSError`` where that does not exist."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Zygotes:
    """Those of one test session, started when ranks are first needed."""

    def __init__(self) -> None:
        self._all: list[Zygote] | None = None
        self._commands = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._all or ():
            each.close()

    def of(self, rank: int) -> Zygote | None:
        """Return the one for a rank, ``None`` where there is none."""
        with _ONE_AT_A_TIME:
            if self._all is None:
                self._all = self._start()
        return self._all[rank % _COUNT] if self._all else None

    def next(self) -> Zygote | None:
        """Return one for a command, by turns."""
        self._commands += 1
        return self.of(self._commands)

    def drop(self, reason: OSError) -> None:
        """Have all ranks started from now on, and warn of that."""
        self._all, dropped = [], self._all or []
        _warn_of(reason, dropped)

    def _start(self) -> list[Zygote]:
        if sys.platform != "linux":
            return []
        made: list[Zygote] = []
        try:
            with adopting():
                pass
            for _ in range(_COUNT):
                made.append(Zygote())  # one by one: those before one that fails are closed
            for each in made:
                each.wait()
        except OSError as error:
            _warn_of(error, made)
            return []
        return made


class Inherited:
    """What a forked command forks its ranks from: a copy of itself, made before it was anything."""

    def __init__(self, sock: socket.socket) -> None:
        self._forker: Forker | None = Forker(sock)

    def of(self, rank: int) -> Forker | None:
        """Return the one for any rank, ``None`` where there is none."""
        return self._forker

    def drop(self, reason: OSError) -> None:
        """Have all ranks started from now on, and warn of that."""
        dropped, self._forker = self._forker, None
        _warn_of(reason, [dropped] if dropped else [])


def fork_ranks_from(sock: socket.socket) -> None:
    """Have the ranks of this process, which is a command, forked at the other end of ``sock``, to its end."""
    inherited = Inherited(sock)
    crew.RankProcess = partial(ForkedRank, inherited)  # type: ignore[misc]
    fork_servers_from(inherited)


def fork_servers_from(source: "Zygotes | Inherited") -> Callable[[], None]:
    """Have the fork server of loader workers forked: it need not import torch. Return what ends that."""
    start = util.spawnv_passfds

    def spawn(path: Any, words: Sequence[Any], fds: Sequence[int]) -> int:
        forker = source.of(0) if _SERVER in str(words[-1]) else None
        environment = dict(os.environ)
        if forker is not None and forker.starts_as(environment):
            numbers = [int(fd) for fd in fds]
            try:
                request = ("server", environment, os.getcwd(), words[-1], numbers)  # noqa: PTH109
                return forker.fork(request, [0, 1, 2, *numbers])
            except OSError as error:  # a stream that was closed, too
                source.drop(error)
        return start(path, words, fds)

    util.spawnv_passfds = spawn
    return partial(setattr, util, "spawnv_passfds", start)


def _warn_of(reason: OSError, dropped: Sequence[Forker]) -> None:
    printed = " ".join([str(reason), *filter(None, [each.close().strip() for each in dropped])])
    warnings.warn(f"ranks are started, which takes longer than to fork them: {printed}", stacklevel=3)


class _Child:
    """What ``RankProcess`` needs of ``subprocess.Popen``, for a child that has another origin."""

    def __init__(self, pid: int, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self._look(0)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkedRank(RankProcess):
    """A rank that is forked, where that is possible."""

    def __init__(self, zygotes: "Zygotes | Inherited", rank: int, *arguments: Any) -> None:
        self._zygotes = zygotes
        super().__init__(rank, *arguments)

    def _start(self, entry: str, environment: Mapping[str, str], control: int, inherit: int) -> Any:
        zygote = self._zygotes.of(self.rank)
        # Without a number of threads a rank takes torch's choice, which was made when torch was imported.
        try:
            folder = os.getcwd()  # noqa: PTH109 (this may be removed, and is looked at once)
        except FileNotFoundError:
            zygote = None
        if zygote is None or "OMP_NUM_THREADS" not in environment:
            return super()._start(entry, environment, control, inherit)
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        fds = [control, theirs_out, theirs_err, *([inherit] if inherit >= 0 else [])]
        try:
            pid = zygote.fork(("rank", dict(environment), folder, entry, inherit), fds)
        except OSError as error:
            os.close(out)
            os.close(err)
            self._zygotes.drop(error)
            # A child that was forked all the same has the old wire: it reads its end, and leaves.
            self.sock.close()
            self.sock, theirs = socket.socketpair()
            with theirs:
                return super()._start(entry, environment, theirs.fileno(), inherit)
        finally:
            os.close(theirs_out)
            os.close(theirs_err)
        return _Child(pid, os.fdopen(out, "rb"), os.fdopen(err, "rb"))


@contextlib.contextmanager
def forking(zygotes: Zygotes) -> Iterator[None]:
    """Have all ranks forked that this process asks for meanwhile."""
    with mock.patch.object(crew, "RankProcess", partial(ForkedRank, zygotes)):
        yield


class ForkedRanks(Ranks):
    """``Ranks`` whose processes are forked from ``zygotes``. All are on ``cpu``, with one thread each."""

    def __init__(self, zygotes: Zygotes, count: int) -> None:
        super().__init__(["cpu"] * count, threads=1)
        self._zygotes = zygotes

    def _start(self) -> Crew:
        with forking(self._zygotes):
            return super()._start()
