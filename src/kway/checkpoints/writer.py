"""Checkpoints saved in the background while training goes on."""

import errno
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from kway.checkpoints.copies import Copies
from kway.checkpoints.saving import remove_older, write_checkpoint
from kway.checkpoints.snapshot import Frozen, Prepared, Snapshot
from kway.errors import UsageError


class Writer:
    """Saves snapshots into ``folder`` (``folder/step-N/``), at most one at a time, in a background thread.

    ``keep``: how many checkpoints stay; older ones are removed once a newer one is durable; ``None``: all. Nothing
    is written before the first save. A save that fails (disk full, folder gone or read-only) never raises: it leaves
    nothing behind, ``failed`` says why, and the next save tries again. For one thread of one process; a ``with``
    block waits at its end. Raises ``UsageError`` where ``keep`` or ``folder`` cannot be.

    ``failed``: why the last save failed, or ``None`` where it did not. ``failures``: how many failed. ``saved``:
    the steps that became durable, in order. ``notices``: what went wrong without harm to a checkpoint.
    ``waited_s``: seconds that saves waited for the one before; ``held_s``: seconds that training spent in ``save``,
    those included.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}", "at least 1 checkpoint has to stay")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file", "checkpoints need a folder", "choose another")
        self.folder, self._keep = folder, keep
        self._copies: dict[str, Copies] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failed: str | None = None
        self.failures = 0
        self.saved: list[int] = []
        self.notices: list[str] = []
        self.waited_s = self.held_s = 0.0

    def prepare(self, snapshot: Snapshot) -> Prepared:
        """Wait for the save before, and do of the next what needs no values: a device may still be at work on them.

        Raises ``UsageError`` as ``save`` does.
        """
        if self._closed:
            raise UsageError("a save into a closed writer", "save before close()")
        begun = time.perf_counter()
        self.wait()
        self.waited_s += time.perf_counter() - begun
        prepared = Prepared(snapshot)
        # Where there is too little memory, ``save`` comes upon it again, and says so.
        with suppress(RuntimeError, MemoryError):
            prepared.ready(self._copies)
        self.held_s += time.perf_counter() - begun
        return prepared

    def save(self, snapshot: Snapshot | Prepared) -> float:
        """Copy ``snapshot`` and write it in the background; return the seconds waited for the save before.

        When this returns, the caller may change every tensor of the snapshot. Raises ``UsageError``, with nothing
        written, where the writer is closed or the snapshot holds what cannot be stored; the place is named.
        """
        before = self.waited_s
        prepared = snapshot if isinstance(snapshot, Prepared) else self.prepare(snapshot)
        if self._closed:
            raise UsageError("a save into a closed writer", "save before close()")
        begun = time.perf_counter()
        try:
            frozen = prepared.freeze(self._copies)
        except (RuntimeError, MemoryError) as error:
            self._fail(prepared.step, f"no memory for a copy of the state: {error}")
        else:
            # A daemon: an end of the process that cannot wait (a second signal) is not held up by a slow disk.
            name = f"checkpoint of step {prepared.step}"
            self._thread = threading.Thread(target=self._write, args=(frozen,), name=name, daemon=True)
            self._thread.start()
        self.held_s += time.perf_counter() - begun
        return self.waited_s - before

    @property
    def after_failure(self) -> str:
        """Say what a failed save means for the others: once the writer is closed there is no next one."""
        untouched = "checkpoints that are there are untouched"
        return untouched if self._closed else f"{untouched}, and the next save tries again"

    def wait(self) -> None:
        """Wait until no save is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the save in flight; later ones are refused. May be called twice."""
        self.wait()
        self._closed = True
        self._copies.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, frozen: Frozen) -> None:
        try:
            write_checkpoint(self.folder, frozen)
        except Exception as error:
            self._fail(frozen.step, self._reason(error, frozen.size))
            return
        self.failed = None
        self.saved.append(frozen.step)
        if self._keep is not None:
            try:
                self.notices += remove_older(self.folder, frozen.step, self._keep)
            except OSError as error:
                self.notices.append(f"old checkpoints in {self.folder} stay ({error.strerror})")

    def _fail(self, step: int, reason: str) -> None:
        self.failures += 1
        self.failed = f"checkpoint of step {step} was not written to {self.folder} ({reason})"

    def _reason(self, error: Exception, size: int) -> str:
        if not isinstance(error, OSError):
            return str(error) or type(error).__name__
        where = f": {error.filename}" if error.filename else ""
        room = ""
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            room = f"; it needs {size} bytes"
            with suppress(OSError):
                room += f", {shutil.disk_usage(self.folder).free} are free"
        return f"{error.strerror or error}{where}{room}"
