"""Device sets of the GPU tests, and two warm ranks on two GPUs."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from kway.launch.local import Ranks


def skip_below(count: int) -> None:
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} CUDA devices, torch sees {found}")


@pytest.fixture
def one() -> str:
    """The first GPU."""
    return "cuda:0"


@pytest.fixture
def two() -> str:
    """Two GPUs, or the test is skipped."""
    skip_below(2)
    return "cuda:0,1"


class Pair:
    """Ranks on two GPUs, started when first needed and again after a test that broke them."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, size: int = 2, on_event: Any = None
    ) -> list[Any]:
        """Call ``function(context, *arguments)`` on both; results by rank."""
        if self._ranks is None or not self._ranks.alive:
            self._ranks = Ranks(["cuda:0", "cuda:1"])
        limit = timedelta(seconds=90)
        return self._ranks.run(function, *arguments, size=size, on_event=on_event, limit=limit)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


@pytest.fixture(scope="session")
def _pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def pair(_pair: Pair, two: str) -> Pair:
    """Two warm ranks, for tests that have no interest in how ranks start."""
    return _pair
