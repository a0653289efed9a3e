"""benchmarks/tuning runs from end to end: what tuning chose is measured beside every combination."""

import json


def test_the_grid_holds_what_can_be_chosen_and_the_choice_is_held_against_it(
    module_of, tmp_path, monkeypatch
):
    script = module_of("tuning", "run")
    # It puts a folder of its own there, which is gone afterwards.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(script, "ROUNDS", 1)
    out = tmp_path / "result.json"
    code = script.main(["lenet", "--smoke", "--tune-seconds", "2", "--samples", "600", "--out", str(out)])
    found = json.loads(out.read_text())
    # Not a test of speed: which is fastest, and by how much, is the machine's to say.
    assert code == bool(found["verdict"])
    assert len(found["grid"]) == 8
    assert all(row["step_s"] for row in found["grid"] if not row["difference"] and not row["refused"])
    assert found["best"] in [row["choice"] for row in found["grid"]]
    assert set(found["turns_step_s"]) == {"best", "choice", "plain"}
    assert all(len(turns) == 1 for turns in found["turns_step_s"].values())
