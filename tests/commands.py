"""Commands that tests start as they always do, with ``subprocess``, and that are forked: see ``tests/forked.py``.

``python -m kway ...``, ``python -c ...`` and ``python script.py ...`` are, and the ranks that kway starts in them. They
have environment, folder, streams, signals and exit status as if started. They differ in what forked ranks differ in.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.forked import Zygotes


class _Command(subprocess.Popen[Any]):
    """A process that is forked, where that is possible."""

    _zygotes: Zygotes

    # By the name and arguments that each Python from 3.11 gives it; what else is asked for is started.
    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, *more,
    ):  # fmt: skip
        words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
        plain = close_fds and not (executable or preexec_fn or pass_fds or shell) and umask < 0
        environment = dict(os.environ if env is None else env)
        zygote = self._zygotes.next() if plain and _can_be_forked(words) else None
        pid = 0
        if zygote is not None and zygote.starts_as(environment):
            streams = [own if own >= 0 else fd for fd, own in enumerate((p2cread, c2pwrite, errwrite))]
            folder = str(Path.cwd() / os.fsdecode(cwd or ""))
            try:
                pid = zygote.fork(("command", environment, folder, words[1:]), streams)
            except OSError as error:
                self._zygotes.drop(error)
        if not pid:
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                *more,
            )  # fmt: skip
        self.pid, self._child_created = pid, True
        return self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _can_be_forked(words: list[str]) -> bool:
    if len(words) < 2 or words[0] != sys.executable:
        return False
    return words[1] == "-c" or words[1:3] == ["-m", "kway"] or words[1].endswith(".py")


@contextlib.contextmanager
def forking_commands(zygotes: Zygotes) -> Iterator[None]:
    """Have the commands forked that this process starts meanwhile."""
    own = type("Popen", (_Command,), {"_zygotes": zygotes})
    with mock.patch.object(subprocess, "Popen", own):
        yield
