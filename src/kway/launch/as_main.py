"""A user's script in this process: from the top, as the real ``__main__``, so that it finds what Python gives it.

What it defines there can be pickled until the very end of the process.
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from kway.errors import UsageError


def run(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run a file, or the module of that name, from the top as ``__main__``."""
    sys.argv[:] = [target, *arguments]
    if module:
        sys.path.insert(0, working_folder())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    path = str(Path(target).absolute())
    source = Path(path).read_bytes()
    if b"\0" in source:  # an archive of modules, which Python runs as well
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, str(Path(path).resolve().parent))
    namespace = sys.modules["__main__"].__dict__
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace.update(__file__=path, __cached__=None, __spec__=None, __doc__=None)
    namespace["__loader__"] = SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), namespace)


def has_own_hook() -> bool:
    """Whether the user's code has put a hook of its own where exceptions end, which is to be called.

    Those that only print (Python's, kway's, and torch's, which adds the rank) have nothing to do where kway prints.
    """
    return sys.excepthook.__module__.partition(".")[0] not in {"sys", "torch", "kway"}


def working_folder() -> str:
    """Return the folder that modules are looked for in first. Raises ``UsageError`` where it was removed."""
    try:
        return str(Path.cwd())
    except OSError as error:
        raise UsageError(
            f"the working directory is not there any more ({error.strerror or error})",
            "-m looks for modules in it",
            "change to one that is there",
        ) from None
