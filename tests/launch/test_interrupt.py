"""Handlers of signals: set while something runs, and put back unless they were changed meanwhile."""

import signal

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
