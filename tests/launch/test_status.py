"""What ranks say they are at, read by another process while they write."""

import os
import threading
import time

import pytest

from kway.launch.status import _LINE, BOARD, PHASES, STEP, VARIABLE, Board, Status, announce, here, watched


@pytest.fixture
def board(tmp_path):
    board = Board(tmp_path / BOARD, 3)
    yield board
    board.close()


def test_each_rank_has_a_line_of_its_own(board):
    first, last = Status.open(board.path, 0), Status.open(board.path, 2)
    first.at("input", 3)
    last.at("evaluate", 7)
    reports = board.read()
    assert [(r.rank, r.phase, r.step) for r in reports] == [(0, "input", 3), (1, "", 0), (2, "evaluate", 7)]
    assert [r.rank for r in board.read(2)] == [0, 1]
    board.clear()
    assert [r.phase for r in board.read()] == ["", "", ""]


def test_a_step_stays_until_the_next_and_every_sign_moves_the_time(board):
    status = Status.open(board.path, 1)
    status.at("input", 4)
    before = board.read()[1]
    status.at(STEP)
    status.beat()
    after = board.read()[1]
    assert (after.step, after.phase) == (4, STEP)
    assert after.since > before.since


def test_waiting_is_marked_counted_and_added_up(board):
    status = Status.open(board.path, 0)
    status.at(STEP, 2)
    with status.waiting:
        inside = board.read()[0]
    outside = board.read()[0]
    assert (inside.waiting, inside.calls, inside.doing) == (True, 1, "reduce")
    assert (outside.waiting, outside.calls, outside.doing) == (False, 1, STEP)
    assert status.waited_s == pytest.approx(outside.since - inside.since)
    with pytest.raises(RuntimeError), status.waiting:
        raise RuntimeError
    assert not board.read()[0].waiting


def test_what_is_done_meanwhile_ends_where_it_began(board):
    status = Status.open(board.path, 0)
    status.at("own code", 5)

    def fail():
        with status.doing("main only"):
            assert board.read()[0].phase == "main only"
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert (board.read()[0].phase, board.read()[0].step) == ("own code", 5)


def test_a_line_is_never_read_half_written(board):
    """The writer keeps all numbers equal: a mix of two lines would show."""
    status, over = Status.open(board.path, 1), threading.Event()

    def write():
        number = 0
        while not over.is_set():
            number += 1
            status._calls = number
            status.at(PHASES[1 + number % 8], number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = [board.read()[1] for _ in range(3000)]
    finally:
        over.set()
        thread.join()
    for report in seen:
        assert report.step == report.calls
        assert report.step == 0 or report.phase == PHASES[1 + report.step % 8]
    assert len({report.step for report in seen}) > 1


@pytest.mark.parametrize("phase", ["", "input", "save"])
def test_a_rank_that_stands_still_in_the_middle_of_writing_is_where_it_was_before(board, phase):
    """``pack_into`` clears what it writes to, then writes number after number: it is stopped after each byte."""
    status, steps = Status.open(board.path, 1), 0
    if phase:
        status.at(phase, steps := 9)
        if phase == "save":  # the other of its two places
            status.beat()
    here, old = status._next, bytes(status._memory)
    status.at("evaluate", 10)
    new = bytes(status._memory)
    line = slice(here, here + _LINE.size)
    for cut in range(_LINE.size - 7):  # with the first byte of the last number it is whole
        for rest in (bytes(_LINE.size), old[line]):
            # Clearing from either end, over what stood there, and writing over what is cleared.
            for torn in (new[line][:cut] + bytes(_LINE.size - cut), bytes(cut) + rest[cut:]):
                status._memory[line] = torn
                seen = board.read()[1]
                assert (seen.phase, seen.step) == (phase, steps)
    status._memory[line] = new[line]
    assert (board.read()[1].phase, board.read()[1].step) == ("evaluate", 10)


def test_a_line_that_never_stands_still_is_as_it_was_read_last(board, monkeypatch):
    status = Status.open(board.path, 0)
    status.at("save", 9)
    seen = board.read()
    monkeypatch.setattr("kway.launch.status._TRIES", 1)
    status.at("input", 10)
    assert board.read() == seen
    board.clear()
    assert board.read()[0].phase == ""


def test_what_an_earlier_task_of_the_rank_wrote_is_never_the_newest(board):
    earlier = Status.open(board.path, 2)
    for _ in range(5):
        earlier.at("save", 9)
    for count in (1, 2, 3):
        later = Status.open(board.path, 2)
        for _ in range(count):
            later.at("start")
            assert (board.read()[2].phase, later.report().phase) == ("start", "start")
        later.waiting.begun()
        assert board.read()[2].calls == 1


def test_a_process_finds_the_line_that_its_parent_gave_it_and_passes_it_to_no_other(board, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not watched()
    here(2).at("start")
    assert here(2).rank == 2
    monkeypatch.setenv(VARIABLE, "")
    announce(board.path, 1, watched=True)
    here().at("start")
    assert (board.read()[1].phase, watched()) == ("start", True)
    monkeypatch.setenv(VARIABLE, os.environ[VARIABLE].replace(str(os.getpid()), "1", 1))
    here().at("input")
    assert (board.read()[1].phase, watched()) == ("start", False)


def test_a_parent_that_is_gone_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    announce(tmp_path / "gone" / BOARD, 1, watched=True)
    here().at("start")


def test_ranks_say_that_they_start_and_that_they_are_done(ranks):
    def looks(context):
        context.status.at("save", 3)
        return context.status.rank, context.status.report().phase

    assert ranks.run(looks) == [(0, "save"), (1, "save")]


def test_a_collective_has_a_name_and_one_that_is_only_begun_is_counted(board):
    status = Status.open(board.path, 0)
    status.at(STEP, 2)
    with status.waiting.inside("all-gather"):
        assert board.read()[0].collective == "all-gather"
    since = board.read()[0].since
    status.waiting.begun()
    begun = board.read()[0]
    assert (begun.calls, begun.waiting, begun.since) == (2, False, since)
    status.beat()
    assert board.read()[0].calls == 2


def test_who_asks_is_told_in_which_collective_a_rank_waited_and_when(board):
    status, notes = Status.open(board.path, 1), []
    with status.waiting.inside("all-reduce"):
        pass
    status.note(notes)
    before = time.monotonic()
    with status.waiting.inside("barrier"):
        pass
    status.waiting.begun()
    after = time.monotonic()
    status.note(None)
    with status.waiting.inside("broadcast"):
        pass
    ((name, begin, end),) = notes
    assert name == "barrier"
    assert before <= begin <= end <= after
