"""A process that has imported what ranks import, and forks into them: the other end of ``tests/forked.py``.

It runs as a file, not as a module, so that a rank has no module more than one that was started has. What it forks
shows its own environment in ``/proc``, as if started: by that, ranks and what they left behind are found.
"""

import array
import ctypes
import fcntl
import gc
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from multiprocessing import process
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# What the first steps of a rank import, torch._dynamo by way of torch.optim; the last two are for commands.
IMPORTED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "kway.launch.worker",
    "kway.jobs.training",
    "kway.jobs.parallel",
    "kway.jobs.proving",
    "kway.cli.main",
    "matplotlib.backends.backend_agg",
)
_FDS = 8  # control, stdout, stderr, and perhaps a listener; three streams, and what a fork server listens at


def serve(control: int) -> Callable[[], Any]:
    """Fork for each request at the descriptor ``control``, and answer with the process id, until its end.

    Returns, in what was forked, what it has to do. The caller does that at the bottom of its stack.
    """
    # What is there now is not looked through again, and so not copied, by each that is forked. Nor while it is
    # imported, which would take longer than the rest of that.
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    # Under no name: what is forked knows no module of the tests. It is for the ranks of commands.
    forked = ModuleType("forked")
    file = Path(sys.argv[3]).with_name("forked.py")
    exec(compile(file.read_text(), str(file), "exec"), vars(forked))
    gc.freeze()
    gc.enable()
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    wire = socket.socket(fileno=control)
    wire.sendall(f"{threads} threads".encode() if threads > 1 else b"ready")
    return _serve(wire, forked)


def _serve(wire: socket.socket, forked: ModuleType) -> Callable[[], Any]:
    while True:
        # One request is one packet: its size is that of an environment.
        text, fds, _, _ = socket.recv_fds(wire, 1 << 20, _FDS)
        if not text:
            os._exit(0)
        pid = _fork_twice()
        if pid == 0:
            wire.close()
            kind, environment, folder, *more = json.loads(text)
            if kind != "server":
                os.setsid()
            if kind == "rank":
                served = _stand_by(forked, fds)
                if served is not None:
                    return served
            _live_in(environment)
            os.chdir(folder)
            return {"rank": _rank, "command": _command, "server": _server}[kind](
                forked, environment, fds, *more
            )
        for fd in fds:
            os.close(fd)
        wire.sendall(str(pid).encode())


def _stand_by(forked: ModuleType, fds: list[int]) -> Callable[[], Any] | None:
    """Have a child that the fork server of a rank is forked from, where it wants one for its loader workers.

    Returns ``None`` in the rank. The child ends with it, and is not marked as what a rank started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for fd in fds:
            os.close(fd)
        return _serve(theirs, forked)
    theirs.close()
    fds.append(ours.detach())
    return None


def _fork_twice() -> int:
    """Return 0 in the new process, and its id here. Its parent is gone then: it is the subreaper's."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            return 0
        os.write(writing, array.array("q", [pid]).tobytes())
        os._exit(0)
    os.close(writing)
    pid = array.array("q", os.read(reading, 8))[0]
    os.close(reading)
    os.waitpid(middle, 0)
    return pid


def _live_in(environment: dict[str, str]) -> None:
    """Have ``environment``, and show it in ``/proc``, where that of the process stands which this was forked from."""
    os.environ.clear()
    os.environ.update(environment)
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    begin, end = int(stat[47]), int(stat[48])  # env_start and env_end of proc(5)
    block = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    if len(block) > end - begin:
        raise OSError(f"an environment of {len(block)} bytes where there is room for {end - begin}")
    ctypes.memmove(begin, block.ljust(end - begin, b"\0"), end - begin)
    # What modules have kept of the environment, and of what is drawn: processes that were started draw different
    # numbers where nobody gave a seed. Python's own module sees to that.
    tempfile.tempdir = None
    torch = import_module("torch")
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    torch.default_generator.seed()
    import_module("numpy").random.seed()


def _keep_only(kept: list[int]) -> None:
    """Close all descriptors but the three streams and these. Those that are kept are passed on."""
    # Which there are, no limit tells.
    end = max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + 1
    for low, high in zip([2, *sorted(kept)], [*sorted(kept), end], strict=True):
        os.closerange(low + 1, high)
    for fd in (0, 1, 2, *kept):
        os.set_inheritable(fd, True)


def _rank(
    forked: ModuleType, environment: dict[str, str], fds: list[int], entry: str, number: int
) -> Callable[[], Any]:
    """Be a rank with what ``kway.launch.process`` would have given it. ``number``: that of the listener, or -1."""
    control, out, err, *listener, standing_by = fds
    # Above those that the launcher names.
    ours = socket.socket(fileno=fcntl.fcntl(standing_by, fcntl.F_DUPFD, max(control, number) + 10))
    with Path(os.devnull).open() as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    if listener and listener[0] != number:
        if control == number:
            control = fcntl.fcntl(control, fcntl.F_DUPFD, number + 1)
        os.dup2(listener[0], number)
    _keep_only(list({control, number, ours.fileno()} - {-1}))
    ours.set_inheritable(False)
    forked.fork_servers_from(forked.Inherited(ours))
    sys.argv = ["-c", entry, str(control), sys.argv[2]]
    return lambda: import_module(entry).main(control)


def _command(
    forked: ModuleType, environment: dict[str, str], fds: list[int], words: list[str]
) -> Callable[[], Any]:
    """Be what ``python`` with these words would be. Ranks that it starts are forked from a copy of what it is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setsid()
        wire = socket.socket(fileno=fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD, 3))
        with Path(os.devnull).open("r+b") as empty:
            for fd in range(3):
                os.dup2(empty.fileno(), fd)
        _keep_only([wire.fileno()])
        ours.detach()
        wire.set_inheritable(False)
        return _serve(wire, forked)
    theirs.close()
    # Beyond the three streams, which are moved to their places.
    ours = socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD, 10))
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in fds]
    for fd, place in zip(moved, range(3), strict=True):
        os.dup2(fd, place)
    _keep_only([ours.fileno()])
    ours.set_inheritable(False)
    forked.fork_ranks_from(ours)
    process.ORIGINAL_DIR = str(Path.cwd())
    sys.orig_argv = [sys.executable, *words]
    sys.path.remove(sys.argv[2])
    main = sys.modules["__main__"] = ModuleType("__main__")
    code = _code(main, words)
    return lambda: exec(code, vars(main))


def _server(
    forked: ModuleType, environment: dict[str, str], fds: list[int], code: str, numbers: list[int]
) -> Callable[[], Any]:
    """Be the fork server that ``code`` makes of an interpreter: its descriptors have the ``numbers`` that it names."""
    places = [0, 1, 2, *numbers]
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(places) + 1) for fd in fds]
    for fd, place in zip(moved, places, strict=True):
        os.dup2(fd, place)
    _keep_only(numbers)
    sys.path.remove(sys.argv[2])
    main = sys.modules["__main__"] = ModuleType("__main__")
    run = _code(main, ["-c", code])
    return lambda: exec(run, vars(main))


def _code(main: ModuleType, words: list[str]) -> CodeType:
    """Return the code of a command; what the interpreter itself would set for it is set."""
    vars(main)["__builtins__"] = __builtins__
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, str(Path.cwd()))
        return compile(f"import runpy; runpy._run_module_as_main({words[1]!r})", "<string>", "exec")
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        return compile(words[1], "<string>", "exec")
    sys.argv = words
    vars(main)["__file__"] = str(Path(words[0]).absolute())
    sys.path.insert(0, str(Path(words[0]).absolute().parent))
    return compile(Path(words[0]).read_text(), words[0], "exec")
