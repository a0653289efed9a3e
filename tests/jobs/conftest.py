"""What tests of jobs share."""

import pytest

from kway.devices.simulated import simulated


@pytest.fixture
def two_cores(monkeypatch, tmp_path):
    """A cache of its own, and a machine of two cores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kway.devices.cpu.usable_cores", lambda *root: 2)
    for place in ("kway.jobs.asked", "kway.jobs.automatic"):
        monkeypatch.setattr(f"{place}.discover", lambda: simulated(cores=2))


@pytest.fixture
def spread(ranks, monkeypatch):
    """Let evaluate and predict run on the warm pool."""
    from kway.jobs.place import Place

    own = Place.run

    def run(self, task, *arguments, **options):
        return own(self, task, *arguments, **{**options, "ranks": ranks})

    monkeypatch.setattr(Place, "run", run)
