"""The inside of a rank that runs a user's script: as ``python script.py`` would, and with a parent that hears.

Started by ``kway.launch.script``. The script gets the real ``__main__``, so that what it defines there can be
pickled until the very end of the process.
"""

import contextlib
import runpy
import signal
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import current_thread, main_thread

from kway.errors import UsageError
from kway.launch import stacks
from kway.launch.failure import of_exception
from kway.launch.lifeline import Lifeline, flush_output, write_whole_lines
from kway.launch.status import BOARD, announce
from kway.launch.temporary import kept_in


@dataclass(frozen=True)
class Script:
    """What to run: a file's path, or a module's name (``module``), with its arguments.

    ``sources``: the entry of ``sys.path`` by which this process found kway, and which the script must not see.
    ``folder``: where this rank says what it is at, and answers for its stack; ``watched``: whether the parent ends
    a job that makes no progress.
    """

    rank: int
    target: str
    module: bool
    arguments: tuple[str, ...]
    sources: str
    folder: str
    watched: bool


def main(control: int) -> None:
    """Run the script that the parent at the other end of the descriptor ``control`` names."""
    line = Lifeline(control)
    script: Script = line.first()
    line.watch(lambda message: None)
    write_whole_lines()
    folder = Path(script.folder)
    announce(folder / BOARD, script.rank, script.watched)
    stacks.answer_in(folder, script.rank)
    kept_in(folder)
    sys.path.remove(script.sources)
    try:
        _run(script)
    except SystemExit as leaving:
        if leaving.code:
            _report(line, script.rank, leaving)
        else:
            _done(line)
        raise
    except BaseException as error:
        _report(line, script.rank, error)
        # The parent shows the traceback, last and once; here it would be one among many. So hooks that only
        # print (Python's, and torch's, which adds the rank) have nothing to do; the user's own are called.
        if sys.excepthook.__module__.partition(".")[0] not in {"sys", "torch"}:
            sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    _done(line)


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


def _done(line: Lifeline) -> None:
    with contextlib.suppress(OSError):  # a script may close what it did not open
        line.send("done")


def _report(line: Lifeline, rank: int, error: BaseException) -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "").startswith("torch.") and current_thread() is main_thread():
        # Torch's own raises at the end of every further loader worker, also in the midst of this.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    flush_output()
    line.send("failure", of_exception(rank, error))


def _run(script: Script) -> None:
    sys.argv[:] = [script.target, *script.arguments]
    if script.module:
        sys.path.insert(0, working_folder())
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        return
    path = str(Path(script.target).absolute())
    sys.path.insert(0, str(Path(path).resolve().parent))
    namespace = sys.modules["__main__"].__dict__
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace.update(__file__=path, __cached__=None, __spec__=None, __doc__=None)
    namespace["__loader__"] = SourceFileLoader("__main__", path)
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), namespace)
