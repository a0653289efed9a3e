"""The fork server's context, whose processes do not run the user's script again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Self


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 (the name that multiprocessing calls)
        with _main_hidden():
            return ForkServerProcess._Popen(process_obj)


class Context(ForkServerContext):
    """Starts processes from a server that has imported torch before it had threads."""

    Process = _Process

    @classmethod
    def preloaded(cls) -> Self:
        """Return a context whose server, where it is not there yet, imports what loader workers need."""
        made = cls()
        made.set_forkserver_preload(["torch", "numpy", "cloudpickle", "kway.data.workers"])
        return made


@contextmanager
def _main_hidden() -> Iterator[None]:
    # A child would import __main__ under another name, and a script without a guard would train again there.
    # Nothing of __main__ is needed: cloudpickle carries it.
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
