"""A way that hangs is seen to hang, and one that ends is seen to end with which weights."""

import argparse
import json
import sys

import pytest

ROWS = '{"rank": 0, "sha256": "a", "step_s": [0.25, 0.5, 0.25]}'
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
    ("code", "ended"), [(ENDS, True), ("import time; time.sleep(60)", False), ("raise SystemExit(1)", False)]
)
def test_what_hangs_or_dies_is_told_from_what_ends(code, ended, script, monkeypatch, tmp_path):
    rank = tmp_path / "rank.py"
    rank.write_text(code)
    monkeypatch.setattr(script, "__file__", str(rank))
    row = script.try_way(options(limit=20.0 if ended else 1.0), {"non_blocking": True, "pinned": False})
    assert row["ended"] == ended
    if ended:
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
