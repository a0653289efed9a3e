"""Handlers of signals: set while something runs, and put back unless they were changed meanwhile."""

import signal
import time

import pytest

from kway.launch.interrupt import EndedBySignal, ignore_wishes, signals_raise


@pytest.fixture(autouse=True)
def _as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_is_put_back():
    with pytest.raises(EndedBySignal), signals_raise():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_ignored_inside_stays_ignored():
    with signals_raise():
        ignore_wishes()
        signal.raise_signal(signal.SIGTERM)
    # In between nothing could have ended this process.
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_comes_while_a_library_loads_waits_until_it_is_there(number):
    scope = {"__name__": "numpy.linalg", "number": number}
    source = (
        "import signal\ntry:\n    signal.raise_signal(number)\nexcept BaseException:\n    pass\nwhole = True"
    )
    start = time.monotonic()

    def loads_and_works():
        exec(compile(source, "numpy/linalg.py", "exec"), scope)
        time.sleep(20)

    with pytest.raises((EndedBySignal, KeyboardInterrupt)), signals_raise():
        loads_and_works()
    assert scope["whole"]
    assert time.monotonic() - start < 10


def test_what_came_while_a_library_loaded_is_not_lost_at_the_end():
    code = compile("import signal\nsignal.raise_signal(signal.SIGTERM)", "torch/late.py", "exec")
    with pytest.raises(EndedBySignal), signals_raise():
        exec(code, {"__name__": "torch.late"})


def test_code_of_the_users_own_that_is_imported_is_interrupted_at_once():
    scope = {"__name__": "mine", "whole": False}
    source = "import signal\nsignal.raise_signal(signal.SIGTERM)\nwhole = True"
    with pytest.raises(EndedBySignal), signals_raise():
        exec(compile(source, "mine.py", "exec"), scope)
    assert not scope["whole"]
