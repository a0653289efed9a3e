"""A call that may never return, under a limit: in a thread of its own, which is left behind."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class OutOfTimeError(Exception):
    """The call did not return in time."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, or raise what it raises; ``OutOfTimeError`` after ``seconds``.

    For calls of C, which nothing can break off: signals are heard meanwhile, which they would not be inside.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    done = threading.Event()
    # A daemon: the process may end without it.
    threading.Thread(target=body, name="kway-limit", daemon=True).start()
    if not done.wait(max(seconds, 0.0)):
        raise OutOfTimeError
    if errors:
        raise errors[0]
    return results[0]
