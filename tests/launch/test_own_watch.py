"""Ranks that no parent of kway's looks at look at each other, with no time limit, too."""

import json
import os
import threading

import torch.distributed as dist

from kway.launch.own_watch import watching
from kway.launch.status import STEP, Board
from kway.world import World


def test_ranks_of_another_launcher_that_wait_for_each_other_in_vain_end_without_a_time_limit(
    monkeypatch, capsys
):
    store, ended = dist.HashStore(), threading.Event()
    monkeypatch.setattr("kway.launch.own_watch._store", lambda: store)
    monkeypatch.setattr("kway.launch.own_watch._LOOK_S", 0.1)
    monkeypatch.setattr("kway.launch.stall.LEFT_S", 0.5)
    monkeypatch.setattr("os._exit", lambda code: ended.set())
    store.set("status/1", json.dumps([9, 6, 1, 0.0, STEP, True, "all-reduce"]))
    with watching(World(rank=0, size=2), None) as status:
        status.at("save", 5)
        with status.waiting.inside("p.save"):
            assert ended.wait(10)
    said = capsys.readouterr().err
    assert said.startswith("kway: error: rank 0 at step 5, inside p.save; rank 1 at step 6, reduce: ")


def test_a_call_inside_of_a_loop_is_looked_at_with_it(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr("kway.launch.own_watch._store", lambda: store)
    with watching(World(rank=0, size=2), None), watching(World(rank=0, size=2), None):
        assert [thread.name for thread in threading.enumerate()].count("kway-stall") == 1


def test_work_inside_of_work_is_at_one_thing_and_does_not_end_it(monkeypatch, tmp_path):
    board = Board(tmp_path / "status", 1)
    monkeypatch.setenv("KWAY_STATUS", f"{os.getpid()}:0:0:{board.path}")
    with watching(World(), None) as outer:
        outer.at("own code", 7)
        with outer.waiting.inside("p.gather"):
            pass
        with watching(World(), None) as inner:
            inner.at(STEP, 1)
            with inner.waiting.inside("all-reduce"):
                pass
        [report] = board.read()
        assert (report.phase, report.step, report.calls) == ("own code", 7, 2)
    assert board.read()[0].phase == "idle"
    with watching(World(), None) as later:
        assert later.report().calls == 0


def test_ranks_that_a_parent_looks_at_do_not_look_themselves(monkeypatch, tmp_path):
    board = Board(tmp_path / "status", 2)
    monkeypatch.setenv("KWAY_STATUS", f"{os.getpid()}:0:0:{board.path}")
    with watching(World(rank=0, size=2), None):
        assert "kway-stall" not in {thread.name for thread in threading.enumerate()}
