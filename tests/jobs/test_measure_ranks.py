"""What experiments are given to start ranks with."""

import time
from types import SimpleNamespace

import pytest

from kway.comm.group import Group
from kway.errors import StallError
from kway.jobs.kept_ranks import KeptRanks


def place_of(context, more):
    group = Group(context.world.rank, context.world.size)
    return group.objects((context.world.rank, context.world.device, more))


def test_a_task_runs_on_one_rank_for_each_device(ranks):
    found = KeptRanks(ranks)(["cpu", "cpu"], place_of, 7)
    assert found == [[(0, "cpu", 7), (1, "cpu", 7)]] * 2


def test_ranks_that_are_there_are_not_started_again(monkeypatch):
    calls = []

    def start(devices, **_):
        return SimpleNamespace(
            alive=True, close=lambda kill: None, run=lambda *arguments, **_: calls.append(len(devices))
        )

    monkeypatch.setattr("kway.jobs.kept_ranks.Ranks", start)
    with KeptRanks() as on_ranks:
        for size in (2, 3, 2):
            on_ranks.start(["cpu"] * size, place_of)
        on_ranks(["cpu"] * 2, place_of, 7)
    assert calls == [2, 3, 2]
    KeptRanks("ranks that are given").start(["cpu"] * 2, place_of)


@pytest.mark.parametrize("kill", [False, True])
def test_ranks_that_cannot_be_ended_keep_no_others_from_it(kill, monkeypatch):
    ended = []

    def start(devices, **_):
        def close(*, kill):
            ended.append((len(devices), kill))
            raise OSError(f"{len(devices)} do not end")

        return SimpleNamespace(alive=True, close=close, run=lambda task, *arguments, **_: [])

    monkeypatch.setattr("kway.jobs.kept_ranks.Ranks", start)

    def measure():
        with KeptRanks() as on_ranks:
            for size in (2, 3, 4):
                on_ranks(["cpu"] * size, place_of, 7)
            if kill:
                raise ValueError("an experiment failed")

    with pytest.raises(OSError, match="do not end"):
        measure()
    assert sorted(ended) == [(2, kill), (3, kill), (4, kill)]


def meets_nobody(context):
    if context.world.rank == 0:
        return Group(context.world.rank, context.world.size).objects("here")
    time.sleep(60)
    return None


@pytest.mark.starts
def test_ranks_that_come_to_no_end_are_given_up_and_the_others_started_anew():
    begun = time.monotonic()
    with KeptRanks() as on_ranks:
        with pytest.raises(StallError, match=r"rank \d is late: step 0, measure") as told:
            on_ranks(["cpu"] * 2, meets_nobody, limit_s=1.0)
        assert "meets_nobody" in told.value.traceback
        assert on_ranks(["cpu"] * 2, place_of, 7) == [[(0, "cpu", 7), (1, "cpu", 7)]] * 2
    assert time.monotonic() - begun < 55
