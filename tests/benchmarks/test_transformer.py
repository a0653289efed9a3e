import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def shares(module_of):
    return module_of("transformer", "shares")


@pytest.fixture
def plan(module_of):
    return module_of("transformer", "gpt_plan")


def row(kind, step_s, size="124m", k=1, spread=0.01, **more):
    """Make a row of a step that has 100 operations."""
    own = {"level": "loose"} if kind == "kway" else {"compiled": "whole"}
    return {
        "kind": kind, "size": size, "k": k, "part": f"{kind}-{size}", "step_kind": "compiled-graph", "step_s": step_s,
        "spread": spread, "flop": 100, "at": 100.0, **own, **more,
    }  # fmt: skip


PEAK = {"kind": "peak", "part": "peak", "k": 1, "at": 100.0, "flops_of_blocks": [100.0, 90.0, 110.0]}


def check(checks, text):
    return next(check for check in checks if text in check["check"])


def test_share_is_of_the_median_peak_and_of_what_was_judged(shares):
    figures = shares.Figures([PEAK, row("kway", 2.0), row("kway", 1.0, level="math"), row("hand", 1.6)])
    checks = shares.share_checks(figures, ["124m"], [1, 4])
    loose, math, hand = (
        check(checks, f"k=1: share of the peak, {name}") for name in ("kway loose", "kway math", "by")
    )
    assert [one["ratio"] for one in (loose, math, hand)] == [0.5, 1.0, 0.625]
    assert [one["passed"] for one in (loose, math, hand)] == [False, True, True]
    assert [one["judged"] for one in (loose, math, hand)] == [True, False, False]
    assert check(checks, "k=4: share of the peak, kway loose")["passed"] is None


def test_overhead_is_judged_by_the_fastest_by_hand_and_shown_like_by_like(shares):
    rows = [
        row("kway", 1.01, step_kind="compiled"),
        row("kway", 1.20),
        row("hand", 1.005, step_kind="compiled"),
        row("hand", 1.00),
        row("hand", 1.10, compiled="apart"),
    ]
    checks = shares.overhead_checks(shares.Figures(rows), ["124m"], [1])
    assert [(one["ratio"], one["judged"]) for one in checks] == [
        (pytest.approx(1.01), True),
        (pytest.approx(1.20), False),
        (pytest.approx(1.01 / 1.005), False),
    ]
    assert checks[0]["way"] == "kway 124m loose compiled / hand 124m compiled-graph whole"


def test_of_several_tries_the_most_settled_counts(shares):
    rows = [row("kway", 0.5, spread=0.2), row("kway", 1.0, spread=0.019), row("hand", 1.0, spread=0.021)]
    only = shares.overhead_checks(shares.Figures(rows), ["124m"], [1])[0]
    assert (only["ratio"], only["settled"]) == (1.0, False)


def test_a_miss_or_what_has_not_settled_fails(shares):
    machine = {"part": "machine", "k": 1, "at": 100.0, "versions": {}, "cluster": {"gpus": []}}

    def fine(own, spread=0.01):
        rows = [machine, PEAK, row("kway", own, spread=spread), row("hand", 1.0)]
        data, table, ok = shares.summarise(rows, ["124m"], [1], ["gpu"])
        assert "kway 124m loose compiled-graph" in table
        assert len(data["steps"]) == 2
        return ok

    assert fine(1.0)
    assert not fine(1.02)
    assert not fine(1.0, spread=0.03)


def test_what_a_bar_is_held_against_comes_first(plan, tmp_path):
    names = [part.name for part in plan.gpu_parts(1, ["124m", "774m"], tmp_path)]
    assert names[:7] == ["machine", "peak", "kway-124m", "hand-124m", "kway-774m", "hand-774m", "yardstick"]
    assert sorted(names[7:]) == ["hand-124m-more", "hand-774m-more", "kway-124m-more", "kway-774m-more"]
    assert "yardstick" not in [part.name for part in plan.gpu_parts(1, ["124m"], None)]


def test_every_planned_way_can_be_read_and_is_planned_once(plan, module_of):
    for which in plan.SIDES:
        way_of = module_of("transformer", f"{which}_part").way_of
        ways = plan.ways_of(which, "774m")
        assert len({str(way_of(f"774m:{way}")) for way in ways}) == len(ways)
        with pytest.raises(ValueError, match="is not SIZE:"):
            way_of("774m:none:none")


def test_only_what_has_not_settled_is_measured_again(plan):
    part = plan.side("kway", "124m", ["loose:compiled", "math:compiled"], 4, "-more")
    rows = [
        row("kway", 1.0, way="124m:loose:compiled", spread=0.2),
        row("kway", 1.0, way="124m:math:compiled"),
    ]
    more = plan.again(part, 4, rows)
    assert (more.name, more.command[1:]) == (part.name, ["124m:loose:compiled", "--k", "4"])
    assert plan.again(part, 4, [*rows, rows[0] | {"spread": 0.01}]) is None
    hand = plan.side("hand", "774m", ["graph:none"], 2)
    assert (
        plan.again(hand, 2, [row("hand", 1.0, spread=None, step_kind="graph")]).command[1]
        == "774m:graph:whole"
    )
    assert plan.again(plan.machine("machine"), 1, []) is None


SCRIPT = """
import json
for size, modes in (("124M", ("ddp", "fsdp")), ("774M", ("ddp", "fsdp"))):
    for mode in modes:
        for number in (1, 2):
            found.append((size, mode, number))
"""


def test_what_is_not_wanted_is_taken_out_of_the_script(module_of):
    narrowed = module_of("transformer", "yardstick_part").narrowed

    def of(text, *wanted):
        names = {"found": []}
        exec(compile(narrowed(text, *wanted), "gpt.py", "exec"), names)
        return names["found"]

    assert of(SCRIPT, ["774m"], ["ddp"]) == [("774M", "ddp", 1), ("774M", "ddp", 2)]
    assert len(of(SCRIPT, ["124m", "774m"], ["ddp", "fsdp"])) == 8
    with pytest.raises(LookupError, match="0 loops"):
        narrowed("for number in range(3): pass", ["774m"], ["ddp"])


def test_both_sides_take_the_same_steps(module_of):
    settings = module_of("transformer", "settings")
    setting = settings.SETTINGS["smoke"]
    hand = module_of("transformer", "by_hand").ByHand(setting, CPU, "eager", "none")
    losses = [float(hand.step()) for _ in range(2 * setting.steps)]
    epochs = [sum(losses[: setting.steps]) / setting.steps, sum(losses[setting.steps :]) / setting.steps]
    assert epochs[1] < 0.9 * epochs[0]
    assert float(hand.total) == pytest.approx(sum(losses))
    way_of, measure = (getattr(module_of("transformer", "kway_part"), name) for name in ("way_of", "measure"))
    found = measure(way_of("smoke:loose:eager"), setting, 1, True)
    assert (found["parameters"], found["flop"]) == (hand.count, setting.flop(hand.count))
    # The rows are the same and come in another order, so that the mean of an epoch is about the same.
    assert found["losses"][:2] == pytest.approx(epochs, rel=0.05)
    assert found["step_s"] > 0
