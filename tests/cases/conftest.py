"""How a case runs: training on k ranks of the warm pool, and a loop of the user's own inside them."""

from collections.abc import Callable
from typing import Any

import pytest

import kway


@pytest.fixture
def trained(ranks: Any) -> Callable[..., Any]:
    """Return ``trained(job, size, **options)``: one epoch of ``job`` on ``size`` CPU ranks, data parallel."""

    def run(job: kway.Job, size: int, **options: Any) -> Any:
        strategy = options.pop("strategy", "data")
        options = {"epochs": 1, "echo": False, **options}
        return kway.train(job, devices=f"cpu:{size}", strategy=strategy, ranks=ranks, **options)

    return run


def _looped(context: Any, job: kway.Job, loop: Callable[..., Any]) -> Any:
    with kway.parallel(job, devices="auto", strategy="data") as session:
        return loop(session)


@pytest.fixture
def looped(ranks: Any) -> Callable[..., list[Any]]:
    """Return ``looped(job, loop, size)``: what ``loop(session)`` returned on each rank of ``kway.parallel``."""
    return lambda job, loop, size=2: ranks.run(_looped, job, loop, size=size)
