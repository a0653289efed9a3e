"""Whether what is shown can be drawn again in place, or stands in a log."""

import os
from collections.abc import Mapping
from typing import TextIO


def redraws(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a line on ``stream`` can be drawn again: on a terminal, unless it is said to be dumb or a log of CI.

    ``environ``: in place of the process's own.
    """
    said = os.environ if environ is None else environ
    is_log = said.get("CI", "").lower() not in ("", "0", "false") or said.get("TERM") == "dumb"
    return stream.isatty() and not is_log
