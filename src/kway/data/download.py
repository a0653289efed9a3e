"""One file over HTTP: in pieces where the connection breaks, checked before it bears its name.

A download grows as ``NAME.part``, beside it ``NAME.part.json`` with what tells that the file on the server is still the
same one (its entity tag, else its date). What is missing is asked for with ``Range`` and ``If-Range`` (RFC 9110,
sections 13.1.5 and 14.2): a server that has another file by now, or that does not know ranges, sends all of it, and the
part is begun anew.
"""

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from kway.data.originals import File
from kway.errors import KwayError

# Called with an event: ``bytes`` (``file``, ``done``, ``of``), ``notice`` (``text``).
Tell = Callable[[dict[str, Any]], None]

_BLOCK = 1 << 18
_OK, _PARTIAL, _NOT_THERE_ANY_MORE = 200, 206, 416
# What a server says when it may do better later: timeout, too many requests, and its own errors.
_PASSING = (408, 429)


@dataclass(frozen=True)
class Patience:
    """How long a server is waited for: ``silence_s`` without a byte, ``tries`` in a row that bring nothing new, and
    ``pause_s`` before the second of them, twice as long before each further one.
    """

    silence_s: float = 30.0
    tries: int = 4
    pause_s: float = 1.0


class _NoUseError(Exception):
    """This address does not give the file, however often it is asked."""


def download(file: File, folder: Path, tell: Tell, patience: Patience) -> Path:
    """Return ``folder``/NAME, whole and of the right SHA-256; what was downloaded before is gone on with.

    Raises ``KwayError`` where no address gives it, with what each said, or it cannot be written; the part stays for the
    next call.
    """
    whole, part = folder / file.name, _Part(folder, file)
    if whole.exists():  # it got this name when it had been checked
        return whole
    reasons: list[str] = []
    for url in file.urls:
        # What was put together, or lay here before, may be wrong where the server's file is right.
        for _ in range(2):
            try:
                _complete(url, part, tell, patience)
            except _NoUseError as error:
                why = str(error)
                break
            found = part.sha256()
            if found == file.sha256:
                part.becomes(whole)
                return whole
            part.discard()
            why = f"content of SHA-256 {found}, not {file.sha256}"
            if part.of_one:
                break
        reasons.append(f"{url}: {why}")
        if url != file.urls[-1]:
            tell({"event": "notice", "text": f"{reasons[-1]}; the next address is tried"})
    raise KwayError(f"{file.name} could not be downloaded ({'; '.join(reasons)})")


class _Part:
    """A file that is not whole yet."""

    def __init__(self, folder: Path, file: File) -> None:
        self.file = file
        self.path, self._facts = folder / f"{file.name}.part", folder / f"{file.name}.part.json"
        # Whether all that is there came in one response of the address that is asked now.
        self.of_one = False

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def validator(self, url: str) -> str | None:
        """Return what says that the file at ``url`` is the one that was begun; ``None``: nothing does."""
        try:
            facts = json.loads(self._facts.read_text())
            return str(facts["validator"]) if facts["url"] == url else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, url: str, validator: str | None) -> None:
        """Empty the part, for a file that begins anew. In an order that is right wherever it is cut off."""
        self.discard()
        self.path.touch()
        if validator is not None:
            self._facts.write_text(json.dumps({"url": url, "validator": validator}))

    def discard(self) -> None:
        for path in (self._facts, self.path):
            path.unlink(missing_ok=True)

    def sha256(self) -> str:
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    def becomes(self, whole: Path) -> None:
        self.path.replace(whole)
        self._facts.unlink(missing_ok=True)


def _complete(url: str, part: _Part, tell: Tell, patience: Patience) -> None:
    """Download until the part has its size; ``part.of_one`` says afterwards whether one response brought it all."""
    most, tries, why = part.size, 0, ""
    part.of_one = False
    while part.size < part.file.size:
        if tries == patience.tries:
            raise _NoUseError(why)
        if tries:
            pause = patience.pause_s * 2 ** (tries - 1)
            tell({"event": "notice", "text": f"{part.file.name}: {why}; tried again in {pause:g} s"})
            time.sleep(pause)
        try:
            _transfer(url, part, tell, patience)
            why = f"the connection ended after {part.size} of {part.file.size} bytes"
        except urllib.error.HTTPError as error:
            with error:
                why = f"the server says {error.code} {error.reason}"
            if error.code == _NOT_THERE_ANY_MORE:
                part.discard()
            elif error.code not in _PASSING and error.code < 500:
                raise _NoUseError(why) from None
        except urllib.error.URLError as error:
            why = _reason(error.reason)
        except (HTTPException, OSError) as error:
            why = _reason(error)
        # A server that breaks off and begins anew each time gets no further, though bytes come.
        tries = 0 if part.size > most else tries + 1
        most = max(most, part.size)


def _transfer(url: str, part: _Part, tell: Tell, patience: Patience) -> None:
    """Add to the part what one request brings, or begin it anew."""
    have, validator = part.size, part.validator(url)
    # Packed once more on its way, it would be another file.
    headers = {"Accept-Encoding": "identity", "User-Agent": "kway"}
    if have and validator is not None:
        headers |= {"Range": f"bytes={have}-", "If-Range": validator}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=patience.silence_s) as response:
        start, size = _extent(response)
        if size not in (None, part.file.size):
            raise _NoUseError(f"it has {size} bytes, not {part.file.size}")
        if start != have or response.status != _PARTIAL:
            if start:
                part.discard()  # another piece than the one asked for
                return
            _begin(part, url, _validator(response))
            part.of_one = True
        else:
            part.of_one = False
        _append(response, part, tell)


def _begin(part: _Part, url: str, validator: str | None) -> None:
    try:
        part.begin(url, validator)
    except OSError as error:
        raise _unwritable(part, error) from None


def _append(response: HTTPResponse, part: _Part, tell: Tell) -> None:
    done, whole = part.size, part.file.size
    try:
        out = part.path.open("ab")
    except OSError as error:
        raise _unwritable(part, error) from None
    with out:
        while block := response.read1(_BLOCK):
            done += len(block)
            if done > whole:
                raise _NoUseError(f"it has more than {whole} bytes")
            try:
                out.write(block)
                out.flush()
            except OSError as error:
                with suppress(OSError):
                    out.close()
                raise _unwritable(part, error) from None
            tell({"event": "bytes", "file": part.file.name, "done": done, "of": whole})


def _extent(response: HTTPResponse) -> tuple[int, int | None]:
    """Return at which byte a response starts and how long the whole file is, where it says so."""
    if response.status == _PARTIAL:
        unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
        span, _, size = rest.partition("/")
        start = span.partition("-")[0]
        if unit != "bytes" or not start.isdecimal():
            raise _NoUseError("the server sends a piece and does not say which")
        return int(start), int(size) if size.isdecimal() else None
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _validator(response: HTTPResponse) -> str | None:
    tag = response.headers.get("ETag")
    if tag and not tag.startswith("W/"):  # a weak one does not promise the same bytes
        return str(tag)
    date: str | None = response.headers.get("Last-Modified")
    return date


def _unwritable(part: _Part, error: OSError) -> KwayError:
    # As an OSError it would be taken for a fault of the network, and tried again.
    return KwayError(
        f"{part.path} cannot be written: {error.strerror or error}", "", "make room, or name another root"
    )


def _reason(error: object) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"no answer ({text})" if isinstance(error, TimeoutError) else str(text)
