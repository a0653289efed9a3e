"""What tests of jobs share."""

import pytest


@pytest.fixture
def spread(ranks, monkeypatch):
    """Let evaluate and predict run on the warm pool."""
    from kway.jobs.place import Place

    own = Place.run

    def run(self, task, *arguments, **options):
        return own(self, task, *arguments, **{**options, "ranks": ranks})

    monkeypatch.setattr(Place, "run", run)
