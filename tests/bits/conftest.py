"""Five ranks, one more than elsewhere: as many as the shards of the jobs here."""

from collections.abc import Iterator

import pytest
from tests.forked import ForkedRanks, Zygotes

from kway.launch.local import Ranks


@pytest.fixture(scope="package")
def five(zygotes: Zygotes) -> Iterator[Ranks]:
    """Five CPU ranks of one thread each, for tests in which no rank fails."""
    ranks = ForkedRanks(zygotes, 5)
    yield ranks
    ranks.close()
