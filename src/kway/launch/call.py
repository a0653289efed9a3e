"""One call of a user's function in a process of its own: what travels there, and what comes back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kway.launch.blame import dump_value
from kway.launch.failure import Failure, of_exception
from kway.launch.payload import load


@dataclass(frozen=True)
class Call:
    """``function`` and ``item`` are payloads. ``around()`` is open while the function runs. ``what``: in words.

    ``folder``: for the large parts of the result.
    """

    function: bytes
    item: bytes
    around: Callable[[], AbstractContextManager[None]]
    what: str
    folder: str


def answer(context: Any, call: Call) -> bytes | Failure:
    """Return the result of ``function(item)`` as a payload, or how it failed.

    Both are new with each call: what one does to what the function holds, the next one does not see.
    """
    try:
        with call.around():
            # The file of an item belongs to this call alone.
            function, item = load(call.function), load(call.item, keep=False)
            result = function(item)
            return dump_value(f"the result of {call.what}", result, Path(call.folder))
    except BaseException as error:  # a call that exits ends itself, and not the process that others need
        return of_exception(context.world.rank, error)
