"""Whether a library is being imported that loses exceptions: one from a signal must wait until it is there.

Torch's C code imports numpy and goes on without it where that fails, for whatever reason; numpy and matplotlib turn
what is raised in their midst into an ``ImportError`` and stay half there.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

_LOSE = ("torch", "numpy", "matplotlib")
_LOOK_S = 0.02


def is_loading(frame: FrameType | None) -> bool:
    """Whether the code of a module of such a library is being run by ``frame`` or by who called it."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            name = frame.f_globals.get("__name__")
            if isinstance(name, str) and name.partition(".")[0] in _LOSE:
                return True
        frame = frame.f_back
    return False


def once_loaded(act: Callable[[], object]) -> None:
    """Call ``act`` in a thread of its own as soon as the main thread loads no such library."""
    threading.Thread(target=_wait, args=(act,), name="kway-loading", daemon=True).start()


def send_again(number: int) -> None:
    """Send the signal ``number`` to the main thread, whatever that waits for."""
    signal.pthread_kill(_main(), number)


def _wait(act: Callable[[], object]) -> None:
    while is_loading(sys._current_frames().get(_main())):
        time.sleep(_LOOK_S)
    act()


def _main() -> int:
    found = threading.main_thread().ident
    assert found is not None  # it has been started
    return found
