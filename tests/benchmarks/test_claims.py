"""A way that hangs is seen to hang, and one that ends is seen to end with which weights."""

import argparse
import json
import sys

import pytest

ROWS = '{"rank": 0, "sha256": "a", "step_s": [0.25, 0.5, 0.25]}'
SLEEPS = "import time; time.sleep(60)"
ENDS = f"print('noise'); print('{ROWS}')"


@pytest.fixture
def script(module_of):
    return module_of("claims", "non_blocking")


def options(**changes):
    return argparse.Namespace(
        **({"kind": "cpu", "ranks": 2, "batch": 8, "steps": 3, "limit": 20.0} | changes)
    )


@pytest.mark.starts
@pytest.mark.parametrize(
    ("code", "limit", "hung", "died"),
    [
        (ENDS, 20.0, None, None),
        (SLEEPS, 1.0, True, {}),
        ("raise SystemExit(3)", 20.0, False, {"0": 3, "1": 3}),
        ("print('no JSON')", 20.0, False, {"0": 0, "1": 0}),
        (f"{ENDS}; import os; os.abort()", 20.0, False, {"0": -6, "1": -6}),
        # The other one waits for it.
        (f"import os\nif os.environ['RANK'] == '1': raise SystemExit(3)\n{SLEEPS}", 3.0, False, {"1": 3}),
    ],
)
def test_what_hangs_and_what_dies_are_told_from_what_ends(
    code, limit, hung, died, script, monkeypatch, tmp_path
):
    rank = tmp_path / "rank.py"
    rank.write_text(code)
    monkeypatch.setattr(script, "__file__", str(rank))
    row = script.try_way(options(limit=limit), {"non_blocking": True, "pinned": False})
    assert (row["ended"], row.get("hung"), row.get("died")) == (died is None, hung, died)
    if died is None:
        assert (row["sha256"], row["step_ms"]) == (["a"], 250.0)


def test_memory_is_pinned_only_where_there_is_a_gpu(script):
    assert [way["pinned"] for way in script.ways("cpu")] == [False, False]
    assert len(script.ways("cuda")) == 4


@pytest.mark.parametrize(("hashes", "code"), [(["a"], 0), (["a", "b"], 1)])
def test_other_weights_fail(hashes, code, script, monkeypatch, capsys):
    row = {"ended": True, "sha256": hashes, "step_ms": 1.0}
    monkeypatch.setattr(script, "try_way", lambda options, way: way | row)
    monkeypatch.setattr(sys, "argv", ["non_blocking.py", "--rounds", "1"])
    assert script.main() == code
    assert json.loads(capsys.readouterr().out)["hung"] == 0


@pytest.mark.parametrize(("hung", "died"), [(True, {}), (False, {"1": 3})])
def test_ways_that_hang_and_that_die_are_counted_apart(hung, died, script, monkeypatch, capsys):
    row = {"ended": True, "sha256": ["a"], "step_ms": 1.0}
    bad = {"ended": False, "hung": hung, "died": died, "after_s": 1.0}
    monkeypatch.setattr(script, "try_way", lambda options, way: way | (bad if way["non_blocking"] else row))
    monkeypatch.setattr(sys, "argv", ["non_blocking.py", "--rounds", "2"])
    assert script.main() == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["hung"], record["died"]) == ((2, 0) if hung else (0, 2))
