"""Where ranks of another launcher meet, in the words of torch: ``tcp://HOST:PORT``, ``file:///PATH`` or ``env://``."""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kway.errors import UsageError

VARIABLE = "KWAY_INIT_METHOD"
ENV = "env://"
LAST_PORT = 65535
_FORMS = "tcp://HOST:PORT, file:///PATH or env://"
_TCP = re.compile(r"tcp://(?:\[(?P<six>[^]]*)\]|(?P<host>[^/:?#\[\]@]*)):(?P<port>[0-9]{1,9})/?")


@dataclass(frozen=True)
class InitMethod:
    """A meeting point: ``host`` and ``port`` of a store that rank 0 serves, or the ``path`` of a file, or neither.

    Neither is ``env://``: ``MASTER_ADDR`` and ``MASTER_PORT`` say it. ``own``: kway chose the file, for ranks of this
    machine and this user.
    """

    host: str = ""
    port: int = 0
    path: Path | None = None
    own: bool = False

    def __str__(self) -> str:
        """Return the URL."""
        if self.path is not None:
            return f"file://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}" if self.host else ENV


def parse(text: str, named: str = VARIABLE) -> InitMethod:
    """Read a URL. Raises ``UsageError`` for one that is none of the forms; ``named``: where it was given."""
    text = text.strip()
    got = f"{named} {text!r}" if named.startswith("-") else f"{named}={text!r}"
    if text == ENV:
        return InitMethod()
    if text.partition("://")[2] and "?" in text:
        raise UsageError(
            got, "rank and number of ranks are no part of it", "set RANK and WORLD_SIZE, and leave out the ?"
        )
    if text.startswith("file://"):
        path = text.removeprefix("file://")
        if not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise UsageError(
                got,
                "the path of a file, from the root on: each rank has a working folder of its own",
                f"write file://{Path.cwd() / (path.strip('/') or 'meeting')}, say",
            )
        return InitMethod(path=Path(path))
    if not text.startswith("tcp://"):
        raise UsageError(got, f"it must be {_FORMS}")
    found = _TCP.fullmatch(text)
    host = (found["six"] or found["host"] or "") if found else ""
    if found is None or not host:
        raise UsageError(got, "a host and a port", "write tcp://10.0.0.1:29500, say, or tcp://[::1]:29500")
    if not 1 <= int(found["port"]) <= LAST_PORT:
        raise UsageError(got, f"ports go from 1 to {LAST_PORT}")
    return InitMethod(host, int(found["port"]))


def check_file(path: Path) -> None:
    """Raise ``UsageError`` where ``path`` cannot be the file by which ranks meet. Nothing of the user's is lost."""
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(
            f"no folder {folder}",
            f"ranks are to meet by {path.name} in it",
            "make it, on all machines the same",
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "ranks meet by a file", f"name one in it: {path / 'meeting'}")
    theirs = _beginning(path)
    if theirs is not None and theirs != SIGN:
        # kway's own is there whole or not at all: an empty one is somebody else's, too.
        raise UsageError(
            f"{path} holds something else" if theirs else f"{path} is there, and empty",
            "the file by which ranks meet is written over, and removed",
            "name one that is not there",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"{folder} cannot be written", f"rank 0 puts {path.name} there", "name another folder"
        )


# How a file by which ranks meet begins.
SIGN = b'{"kway meeting": 1'


def _beginning(path: Path) -> bytes | None:
    """Return as many bytes as ``SIGN`` has; ``None``: no such file. Raises ``UsageError`` for an unreadable one."""
    try:
        # Asked before it is opened: a pipe would be waited for.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(
                f"{path} is no regular file", "ranks meet by a file", "name one that is not there"
            )
        with path.open("rb") as file:
            return file.read(len(SIGN))
    except FileNotFoundError:
        # Also between the two: rank 0 of a job before removes its own.
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read", error.strerror or str(error)) from None


def chosen(environ: Mapping[str, str]) -> InitMethod | None:
    """Return what ``KWAY_INIT_METHOD`` says; ``None`` where it is not set. Raises ``UsageError``."""
    text = environ.get(VARIABLE, "").strip()
    return parse(text) if text else None
