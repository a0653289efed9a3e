"""The first rank's turn before that of the others: a wait over the store, which no time limit of a back end ends."""

import time
from typing import Any

from kway.comm.group import Group

_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05


class Turns:
    """Turns of the ranks of ``group``, all of which take the same ones in the same order. To make one is a collective.

    Several may be in use at once, and a rank that is late in one does not mistake another's turn for its own.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._turn, self._series = group, 0, 0
        if group.size > 1:
            # The first rank's count, told to all: a series that some ranks failed to begin puts none out of step.
            own = _store().add("kway-turns", 1) if group.rank == 0 else 0
            self._series = int(group.objects(own)[0])

    def pass_on(self) -> None:
        """On the first rank: its turn is over. On the others: wait for that. Returns at once on a rank alone.

        Raises what torch raises where the process that holds the store, mostly the first rank, is gone.
        """
        if self._group.size == 1:
            return
        self._turn += 1
        store, key = _store(), f"kway-turn/{self._series}/{self._turn}"
        with self._group.waiting.inside("turn"):
            if self._group.rank == 0:
                store.set(key, "over")
                return
            pause = _FIRST_LOOK_S
            while not store.check([key]):
                time.sleep(pause)
                pause = min(2 * pause, _LAST_LOOK_S)
            # The last one to see it takes it away: a loop may take many.
            if store.add(f"{key}/seen", 1) == self._group.size - 1:
                store.delete_key(f"{key}/seen")
                store.delete_key(key)


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
