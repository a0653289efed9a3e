"""The inside of a script on one device: as ``python script.py``, with the exit codes of several devices.

``kway.launch.script`` becomes this process, so that terminal, input and signals are the script's own.
"""

import sys
from types import TracebackType

from kway.errors import KwayError, RankError
from kway.launch.as_main import has_own_hook, run
from kway.launch.own_frames import without_own_frames


def main() -> None:
    """Run what ``sys.argv`` names: where kway is, ``file`` or ``module``, its path or name, and its arguments."""
    _, sources, kind, target, *arguments = sys.argv
    sys.path.remove(sources)
    sys.excepthook = _show
    try:
        run(target, arguments, module=kind == "module")
    except RankError:  # of ranks that the script started: an error like any other here, as it is for a rank
        raise
    except KwayError as error:
        _end(error)


def _end(error: KwayError) -> None:
    if has_own_hook():
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        # Not before it is needed: a script that does well starts as fast as it would with Python.
        from kway.launch.failure import of_exception
        from kway.launch.lifeline import flush_output

        flush_output()
        print(f"{of_exception(0, error).traceback}kway: error: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from None


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Do as Python does with an exception that nobody caught, but for the frames that are not the script's.

    Nothing is imported here: an interrupt counts as one, for the exit code, only while no other code is compiled.
    """
    error = without_own_frames(error.with_traceback(trace))
    sys.__excepthook__(kind, error, error.__traceback__)
