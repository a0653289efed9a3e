"""What tests share: a warm pool of ranks, a look at what they leave behind, and folders of their own."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from kway.launch.local import Ranks


class Pool:
    """Four CPU ranks, started when a test first needs them and again after a test that broke them."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        size: int = 2,
        on_event: Callable[[Any], None] | None = None,
        limit: float = 60,
    ) -> list[Any]:
        """Call ``function(context, *arguments)`` in ``size`` ranks of one thread each; results by rank."""
        if self._ranks is None or not self._ranks.alive:
            self._ranks = Ranks(["cpu"] * 4, threads=1)
        return self._ranks.run(
            function, *arguments, size=size, on_event=on_event, limit=timedelta(seconds=limit)
        )

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
