"""What torch's profiler says of itself."""

import os
from collections.abc import MutableMapping

# What it writes on standard error below this is of no use to whoever trains.
LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"


def quiet(environ: MutableMapping[str, str] | None = None) -> None:
    """Let torch's profiler begin and end without a word, from its first use in this process on.

    What the user has set of it counts.
    """
    (os.environ if environ is None else environ).setdefault(LEVEL, _SILENT)
