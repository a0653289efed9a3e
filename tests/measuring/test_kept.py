"""What was measured before, kept in files that may be damaged."""

import copy
import json

import pytest
from tests.measured import entry, figure

from kway.devices.torch_facts import cache_folder
from kway.jobs import measuring
from kway.measuring.experiment import chosen
from kway.measuring.kept import keep, recall
from kway.report.measured import lines_of

KNOWN = {"cpu": ["a CPU", 2]}
(BESIDE,) = chosen("beside")
MADE = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The file of what was kept, and what is read of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep(KNOWN, BESIDE, True, entry("beside"), [figure("beside", "turns of threads", "s", 1.0, threads=2)])
    (file,) = (cache_folder() / "measured").glob("*/beside-quick.json")
    return file, json.loads(file.read_text())


@pytest.mark.parametrize(
    "damage",
    [
        {"made": "garbage"},
        {"made": 5},
        {"made": ""},
        {"made": "2026-11-30T00:00:00"},  # nobody can tell in which zone
        {"notes": 5},
        {"name": "other"},
        {"busy": 3},
        {"left": ["x"]},
        {"seconds": "x"},
        {"how": "somehow"},
    ],
)
def test_what_is_damaged_is_not_remembered(kept, damage):
    file, held = kept
    assert recall(KNOWN, BESIDE, quick=True) == {name: held[name] for name in ("entry", "figures")}
    file.write_text(json.dumps({**held, "entry": {**held["entry"], **damage}}))
    assert recall(KNOWN, BESIDE, quick=True) is None


def test_an_entry_of_before_that_lacks_what_may_be_missing_is_remembered(kept):
    file, held = kept
    del held["entry"]["busy"]
    file.write_text(json.dumps(held))
    assert recall(KNOWN, BESIDE, quick=True) is not None


def test_whatever_is_remembered_can_be_shown(kept):
    """Any field of any kind: it is not remembered, or as good as any."""
    file, held = kept
    fields = [("entry", name) for name in held["entry"]] + [
        ("figures", 0, name) for name in held["figures"][0]
    ]
    taken = 0
    for path in [("entry",), ("figures",), ("figures", 0), *fields]:
        for value in (None, True, -1, 1e308, "x", [], [None], {}, {"a": [1]}):
            damaged = copy.deepcopy(held)
            place = damaged
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            file.write_text(json.dumps(damaged))
            found = recall(KNOWN, BESIDE, quick=True)
            if found is not None:
                row, figures = measuring._known(BESIDE, ("cpu",), True, found)
                lines_of(measuring.Measurements({}, {}, ["cpu"], True, MADE, 0.0, 0.0, [row], figures))
                taken += 1
    assert taken > 5
