"""A rank's log: everything that it prints, byte for byte."""

import contextlib
from pathlib import Path
from typing import BinaryIO


class Log:
    """The file ``path``, made anew. What cannot be written is lost with one warning: a full disk stops no rank.

    Raises ``OSError`` where it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = path.open("wb", buffering=0)

    def write(self, chunk: bytes) -> str:
        """Add ``chunk``; return a warning the first time that this fails."""
        try:
            while self._file is not None and chunk:
                chunk = chunk[self._file.write(chunk) :]
        except OSError as error:
            self.close()
            return f"kway: warning: {self._path} cannot be written: {error.strerror}; the log ends here\n"
        return ""

    def close(self) -> None:
        """Close the file; nothing more is written."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
