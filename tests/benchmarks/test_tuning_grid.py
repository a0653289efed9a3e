"""benchmarks/tuning runs from end to end: what tuning chose is measured beside every combination."""

import json

import pytest

from kway.jobs.place import place


def test_the_grid_holds_what_can_be_chosen_and_the_choice_is_held_against_it(
    module_of, tmp_path, monkeypatch
):
    script = module_of("tuning", "run")
    # It puts a folder of its own there, which is gone afterwards.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(script, "ROUNDS", 1)
    out = tmp_path / "result.json"
    words = ["lenet", "--smoke", "--tune-seconds", "2", "--samples", "600", "--batch-size", "32"]
    words += ["--kinds", "eager,compiled"]
    code = script.main([*words, "--out", str(out)])
    found = json.loads(out.read_text())
    assert (found["batch_size"], found["kinds"]) == (32, ["eager", "compiled"])
    # Not a test of speed: which is fastest, and by how much, is the machine's to say.
    assert code == bool(found["verdict"])
    assert set(found["ratios"]) == {"choice over best", "choice over plain"}
    assert len(found["grid"]) == 8
    assert all(row["step_s"] for row in found["grid"] if not row["difference"] and not row["refused"])
    assert found["best"] in [row["choice"] for row in found["grid"]]
    assert set(found["turns_step_s"]) == {"best", "choice", "plain"}
    assert all(len(turns) == 1 for turns in found["turns_step_s"].values())


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ("graph,grahp", "--kinds: unknown: 'grahp'; there are eager, compiled, graph, compiled-graph"),
        ("", "--kinds: unknown: ''"),
        ("compiled", "--kinds: nothing to measure with compiled on cpu in a smoke test"),
        (
            "graph,compiled-graph",
            "--kinds: nothing to measure with graph,compiled-graph on cpu in a smoke test",
        ),
    ],
)
def test_step_kinds_that_are_none_or_leave_nothing_are_an_error_before_tuning(
    module_of, tmp_path, monkeypatch, capsys, kinds, said
):
    script = module_of("tuning", "run")
    monkeypatch.setattr(script, "place", lambda *_, **options: place("cpu:1", **options))
    monkeypatch.setattr(script, "measured", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        script.main(["lenet", "--smoke", "--kinds", kinds, "--out", str(tmp_path / "result.json")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "over", "gain", "chosen", "late", "missed"),
    [
        ("cuda", 1.04, 0.5, True, False, ""),
        ("cuda", 1.06, 0.5, True, False, "over 5% slower than the best"),
        ("cuda", 1.0, 0.5, True, True, "tuning took too long"),
        ("cuda", 1.0, 1.01, True, False, "slower than the step as it is"),
        ("cuda", 1.0, 1.01, False, False, ""),
        # On a CPU it is enough that a choice is no slower than none.
        ("cpu", 1.5, 1.0, True, True, ""),
        ("cpu", 1.0, 1.01, True, False, "slower than the step as it is"),
        ("cpu", 1.0, 1.01, False, False, ""),
    ],
)
def test_what_is_a_fault_on_a_gpu_may_be_none_on_a_cpu(module_of, device, over, gain, chosen, late, missed):
    assert module_of("tuning", "run").judged(device, over, gain, chosen, late) == missed
