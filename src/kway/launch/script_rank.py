"""The inside of a rank that runs a user's script: as ``python script.py`` would, and with a parent that hears.

Started by ``kway.launch.script``. The script gets the real ``__main__``, so that what it defines there can be
pickled until the very end of the process.
"""

import contextlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread

from kway.launch import stacks
from kway.launch.as_main import has_own_hook, run
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
        run(script.target, script.arguments, module=script.module)
    except SystemExit as leaving:
        if leaving.code:
            _report(line, script.rank, leaving)
        else:
            _done(line)
        raise
    except BaseException as error:
        _report(line, script.rank, error)
        # The parent shows the traceback, last and once; here it would be one among many.
        if has_own_hook():
            sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    _done(line)


def _done(line: Lifeline) -> None:
    with contextlib.suppress(OSError):  # a script may close what it did not open
        line.send("done", _has_met())


def _has_met() -> bool:
    """Whether this process has been in a process group: kway's, which stays until the end, or one of the script's."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    # What stays of a group that is gone.
    made = getattr(c10d, "_default_pg_init_method", None)
    return c10d is not None and (made is not None or c10d.is_initialized())


def _report(line: Lifeline, rank: int, error: BaseException) -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "").startswith("torch.") and current_thread() is main_thread():
        # Torch's own raises at the end of every further loader worker, also in the midst of this.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    flush_output()
    line.send("failure", of_exception(rank, error))
