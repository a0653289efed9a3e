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


@pytest.fixture
def first() -> Callable[[int], str]:
    """Return the device set of the first so many GPUs, or skip the test."""

    def device_set(count: int) -> str:
        skip_below(count)
        return "cuda:" + ",".join(map(str, range(count)))

    return device_set


class Warm:
    """Ranks on the first GPUs, started when first needed and again after a test that broke them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ranks: Ranks | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, size: int = 2, **options: Any) -> list[Any]:
        """Call ``function(context, *arguments)`` in ``size`` of them; results by rank."""
        if self._ranks is None or not self._ranks.alive:
            self._ranks = Ranks([f"cuda:{index}" for index in range(self._count)])
        limit = timedelta(seconds=90)
        return self._ranks.run(function, *arguments, size=size, limit=limit, **options)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


@pytest.fixture(scope="session")
def _pair() -> Iterator[Warm]:
    pair = Warm(2)
    yield pair
    pair.close()


@pytest.fixture
def pair(_pair: Warm, two: str) -> Warm:
    """Two warm ranks, for tests that have no interest in how ranks start."""
    return _pair


@pytest.fixture(scope="session")
def _up_to_four() -> Iterator[tuple[Warm, int]]:
    count = min(4, torch.cuda.device_count())
    ranks = Warm(count)
    with pytest.MonkeyPatch.context() as patch:
        # cuBLAS reads it when it starts: ranks that wait for a task at level bits must have it from the beginning.
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield ranks, count
    ranks.close()


@pytest.fixture
def up_to_four(_up_to_four: tuple[Warm, int]) -> tuple[Warm, str]:
    """Warm ranks on up to four GPUs, at least two, for level bits; and the device sets of 1 to as many."""
    ranks, count = _up_to_four
    skip_below(2)
    return ranks, " ".join("cuda:" + ",".join(map(str, range(k))) for k in range(1, count + 1))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure when it happens: time on such a machine can end before the summary comes."""
    if report.failed:
        print(f"\n{report.nodeid} failed in {report.when}:\n{report.longreprtext}", flush=True)
