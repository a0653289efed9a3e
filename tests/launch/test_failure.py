import pytest

from kway.errors import NonFiniteError, RankError
from kway.launch.failure import Failure, first, of_exception, of_exit_status, to_error


class NoisyError(Exception):
    pass


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


@pytest.mark.parametrize(
    ("error", "cause", "whole"),
    [
        (ValueError("first\nsecond"), "ValueError: first", "second"),
        (ValueError("\n\n  first\nsecond"), "ValueError: first", "second"),
        (ValueError("x" * 5000), f"ValueError: {'x' * 485}...", "x" * 5000),
        (SyntaxError("bad", ("a.py", 3, 1, "a b", 3, 3)), "SyntaxError: bad", 'File "a.py", line 3'),
        (KeyError("a\nb"), r"KeyError: 'a\nb'", "KeyError"),
        (SystemExit("first\nsecond"), "SystemExit: first", "second"),
        (NoisyError("first"), "tests.launch.test_failure.NoisyError: first", "first"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)
def test_the_cause_is_one_line_and_the_traceback_holds_the_rest(error, cause, whole):
    error = to_error(raised(error))
    assert error.cause == cause
    assert str(error).splitlines()[-1] == f"rank 1 failed: {cause}"
    assert whole in error.traceback


def test_what_a_loader_of_torch_hands_on_is_told_with_what_it_was():
    found = raised(
        ValueError(
            "Caught ValueError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n  File 'a', line 1, in b\nValueError: boom\n"
        )
    )
    assert found.cause == "ValueError: Caught ValueError in DataLoader worker process 0: ValueError: boom"


def test_a_lost_peer_is_known_by_any_line_of_the_message():
    assert raised(RuntimeError("failed\nConnection closed by peer")).is_consequence


def test_chained_causes_are_kept():
    outer = ValueError("outer")
    outer.__cause__ = KeyError("inner")
    assert "KeyError: 'inner'" in raised(outer).traceback


def test_an_exception_without_words_is_told_by_its_class():
    class WordlessError(Exception):
        def __str__(self):
            raise ValueError("no words")

    assert to_error(raised(WordlessError())).headline.endswith("WordlessError: <exception str() failed>")
