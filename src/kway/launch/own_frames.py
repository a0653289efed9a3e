"""The outermost frames of a traceback: of what runs the user's code, which say nothing to the user."""

import importlib
import os
from importlib.util import find_spec
from pathlib import Path

OWN = {
    str(Path(__file__).with_name(name))
    for name in ("worker.py", "script_rank.py", "script_alone.py", "as_main.py", "call.py")
} | {"<frozen runpy>", "<string>"}


def without_own_frames(error: BaseException) -> BaseException:
    """Drop the outermost frames, which are the rank's own, so that a traceback begins with the user's code."""
    trace = error.__traceback__
    while trace is not None and OWN & {trace.tb_frame.f_code.co_filename}:
        trace = trace.tb_next
    # What is left without a frame was raised by the rank itself: worth showing, but for a script's bad syntax.
    return error.with_traceback(trace) if trace is not None or isinstance(error, SyntaxError) else error


def from_users_code(error: BaseException) -> BaseException:
    """Drop the outermost frames that are kway's, torch's or an import's; all stay where there are no others."""
    torch = find_spec("torch")
    inside = [Path(__file__).parents[1], Path(importlib.__file__).parent]
    inside += [Path(torch.origin).parent] if torch and torch.origin else []
    starts = tuple(f"{folder}{os.sep}" for folder in inside)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((*starts, "<frozen ")):
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)
