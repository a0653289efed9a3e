"""Five ranks, one more than elsewhere: as many as the shards of the jobs here."""

from collections.abc import Iterator

import pytest

from kway.launch.local import Ranks


@pytest.fixture(scope="package")
def five() -> Iterator[Ranks]:
    """Five CPU ranks of one thread each, for tests in which no rank fails."""
    ranks = Ranks(["cpu"] * 5, threads=1)
    yield ranks
    ranks.close()
