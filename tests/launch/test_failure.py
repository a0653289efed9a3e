import pytest

from kway.errors import NonFiniteError, RankError
from kway.launch.failure import Failure, first, of_exception, of_exit_status, to_error


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return of_exception(1, caught)


def test_the_earliest_failure_is_the_cause():
    late, early = Failure(0, 2.0, 1, "late"), Failure(3, 1.0, 1, "early")
    assert first([late, early]) is early


def test_what_a_lost_peer_causes_ranks_behind_any_other_cause():
    lost = raised(RuntimeError("[...] Connection closed by peer [127.0.0.1]:16006."))
    killed = of_exit_status(0, -9)
    assert lost.when < killed.when
    assert first([lost, killed]) is killed
    assert first([lost]) is lost


def test_a_users_own_runtime_error_is_no_consequence():
    assert not raised(RuntimeError("shapes do not match")).is_consequence
    assert not raised(ValueError("connection closed by peer")).is_consequence


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(-9, 137, "SIGKILL"), (-15, 143, "SIGTERM"), (3, 3, "exit code 3"), (0, 1, "ended early")],
)
def test_statuses_of_processes(status, code, words):
    found = of_exit_status(2, status)
    assert (found.rank, found.exit_code) == (2, code)
    assert words in found.cause


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        (42, 42, "exit code 42"),
        (0, 1, "ended early"),
        (None, 1, "ended early"),
        ("bye", 1, "bye"),
        (1.5, 1, "1.5"),
        (256, 1, "256"),
    ],
)
def test_exits(argument, code, words):
    found = raised(SystemExit(argument))
    assert found.exit_code == code
    assert words in found.cause


def test_kways_own_errors_come_back_as_they_were():
    error = to_error(raised(NonFiniteError("the loss is nan", "epoch 1, step 3, rank 1")))
    assert type(error) is NonFiniteError
    assert str(error) == "the loss is nan: epoch 1, step 3, rank 1"


def test_all_others_carry_rank_code_and_traceback_with_the_cause_last():
    error = to_error(raised(ValueError("boom")))
    assert isinstance(error, RankError)
    assert (error.rank, error.exit_code) == (1, 1)
    assert "raise error" in error.traceback
    assert error.traceback.rstrip().endswith("ValueError: boom")
    assert str(error).endswith("rank 1 failed: ValueError: boom")


def test_chained_causes_are_kept():
    outer = ValueError("outer")
    outer.__cause__ = KeyError("inner")
    assert "KeyError: 'inner'" in raised(outer).traceback


def test_an_exception_without_words_is_told_by_its_class():
    class WordlessError(Exception):
        def __str__(self):
            raise ValueError("no words")

    assert to_error(raised(WordlessError())).headline.endswith("WordlessError: <exception str() failed>")
