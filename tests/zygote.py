"""A process that has imported what ranks import, and forks into them: the other end of ``tests/forked.py``.

It runs as a file, not as a module, so that a rank has no module more than one that was started has.
"""

import array
import fcntl
import json
import os
import socket
import sys
from importlib import import_module
from pathlib import Path

# What the first steps of a rank import, torch._dynamo by way of torch.optim.
IMPORTED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "kway.launch.worker",
    "kway.jobs.training",
    "kway.jobs.parallel",
    "kway.jobs.proving",
)
_FDS = 4  # control, stdout, stderr, and perhaps a listener


def serve(control: int) -> None:
    """Fork a rank for each request at the descriptor ``control``, and answer with its process id, until its end."""
    for name in IMPORTED:
        import_module(name)
    wire = socket.socket(fileno=control)
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    wire.sendall(f"{threads} threads".encode() if threads > 1 else b"ready")
    while True:
        # One request is one packet: its size is that of an environment.
        text, fds, _, _ = socket.recv_fds(wire, 1 << 20, _FDS)
        if not text:
            os._exit(0)
        pid = _fork_twice()
        if pid == 0:
            wire.detach()
            _become(*json.loads(text), fds)
            return
        for fd in fds:
            os.close(fd)
        wire.sendall(str(pid).encode())


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


def _become(entry: str, environment: dict[str, str], number: int, fds: list[int]) -> None:
    """Run a rank with what ``kway.launch.process`` would have given it. ``number``: that of the listener, or -1."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    control, out, err, *listener = fds
    with Path(os.devnull).open() as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    if listener and listener[0] != number:
        if control == number:
            control = fcntl.fcntl(control, fcntl.F_DUPFD, number + 1)
        os.dup2(listener[0], number)
    kept = sorted({2, control, number} - {-1})
    # Which there are, no limit tells.
    end = max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + 1
    for low, high in zip(kept, [*kept[1:], end], strict=True):
        os.closerange(low + 1, high)
    for fd in kept:
        os.set_inheritable(fd, True)
    sys.argv = ["-c", entry, str(control), sys.argv[2]]
    torch = import_module("torch")
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    # Ranks that were started draw different numbers where nobody gave a seed. Python's own module sees to that.
    torch.default_generator.seed()
    import_module("numpy").random.seed()
    import_module(entry).main(control)
