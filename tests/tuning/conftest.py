"""What tests of tuning share."""

import importlib

import pytest


@pytest.fixture
def short(monkeypatch, tmp_path):
    """A cache of its own, windows of two steps, one thread and no compiler: what is timed is no test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kway.tuning.trial.WINDOW_S", 0.0)
    monkeypatch.setattr("kway.jobs.place.rank_threads", lambda device_set: 1)
    # What reads the compiler's name once, when it is imported, is not to read this one.
    importlib.import_module("torch._inductor.config")
    monkeypatch.setenv("CXX", "no-such-compiler")
