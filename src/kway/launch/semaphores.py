"""What loader workers leave in shared memory when their process is killed: removed without a word."""

import sys


def cleared_quietly() -> None:
    """Have what loader workers of this process leave when it is killed removed without a warning.

    Python starts a process for that, which warns of what it had to remove. kway's own processes are killed as a matter
    of course, and the user can do nothing about it; not for a process of the user's own.
    """
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # what it starts inherits them
