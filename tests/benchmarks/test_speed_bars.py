import pytest

UNSETTLED = 0.2


@pytest.fixture
def bars(module_of):
    return module_of("speed", "bars")


@pytest.fixture
def result(module_of):
    return module_of("speed", "result")


def trained(
    model,
    k,
    seconds,
    precision="fp32",
    level="loose",
    kind="compiled-graph",
    spread=0.01,
    form="channels_last",
):
    return {
        "kind": "train", "part": f"kway-{model}", "model": model, "k": k, "precision": precision, "level": level,
        "step_kind": kind, "memory_format": form, "epoch_s": seconds, "epoch_s_spread": spread,
        "step_s": seconds / 100, "step_s_spread": spread, "input_wait_s": 0.0,
        "way": f"{model}:{precision}:{level}:{kind}:{form}", "at": 100.0,
    }  # fmt: skip


def peer(what, k, *seconds):
    row = {"kind": "yardstick", "part": "peers", "what": what, "k": k, "all": list(seconds), "at": 100.0}
    return {**row, "s_epoch": min(seconds)}


def check(bars, rows, name):
    bar = next(bar for bar in bars.gpu_bars() if bar.name == name)
    return bars.held_against(bar, bars.Figures(rows))


def test_spread_of_few_values_and_of_blocks(bars):
    assert bars.settled_spread([3.0]) is None
    assert bars.settled_spread([1.0, 2.0, 1.5]) == pytest.approx(1 / 1.5)
    # Ten values are five blocks of two: medians 1, 1, 1, 1, 2; one outlier in a block of three would vanish.
    assert bars.settled_spread([1.0] * 8 + [2.0, 2.0]) == 1.0
    assert bars.settled_spread([1.0] * 14 + [9.0]) == 0.0


def test_ratio_is_of_medians_after_the_others_first_epoch(bars):
    rows = [trained("lenet", 1, 0.10), peer("DDP fp32 resident lenet", 1, 9.0, 0.50, 0.51, 0.49)]
    found = check(bars, rows, "LeNet epoch, k=1: kway / DDP with data on the GPU")
    assert found["ratio"] == pytest.approx(0.10 / 0.50)
    assert found["passed"]
    assert found["settled"]
    slower = check(
        bars, [trained("lenet", 1, 0.11), rows[1]], "LeNet epoch, k=1: kway / DDP with data on the GPU"
    )
    assert slower["passed"] is False


def test_the_fastest_kind_counts_but_of_its_tries_the_most_settled(bars):
    rows = [
        trained("lenet", 1, 0.30, kind="eager"),
        trained("lenet", 1, 0.08, spread=UNSETTLED),
        trained("lenet", 1, 0.12, spread=0.02),
        trained("lenet", 1, 0.01, level="math"),
        trained("lenet", 1, 0.01, precision="tf32"),
    ]
    figure = bars.Figures(rows).own("lenet", 1, "fp32", "epoch_s")
    assert (figure.seconds, figure.spread) == (0.12, 0.02)


def test_more_gpus_must_be_faster_not_as_fast(bars):
    rows = [trained("lenet", 1, 0.10), trained("lenet", 2, 0.10), trained("lenet", 4, 0.09)]
    assert check(bars, rows, "LeNet epoch: kway on 2 / on 1")["passed"] is False
    assert check(bars, rows, "LeNet epoch: kway on 4 / on 2")["passed"] is True


def test_what_was_not_measured_passes_nothing(bars):
    found = check(bars, [trained("lenet", 4, 0.07)], "LeNet epoch, k=4: kway / from-scratch loop")
    assert (found["ratio"], found["passed"], found["missing"]) == (None, None, "the other")


def test_graph_step_is_that_of_the_slowest_rank_and_single_readings_have_not_settled(bars):
    row = {"kind": "yardstick", "part": "graph", "file": "graph", "m": "lenet", "k": 2, "mode": "cr"}
    rows = [
        {**row, "us": [200.0, 250.0]},
        {**row, "us": [-1.0, -1.0]},
        {**row, "mode": "c", "us": [1.0, 1.0]},
    ]
    figure = bars.Figures(rows).graph_step("lenet", 2)
    assert figure.seconds == pytest.approx(250e-6)
    assert figure.spread is None
    again = bars.Figures([*rows, {**row, "us": [255.0, 240.0]}]).graph_step("lenet", 2)
    assert again.spread == pytest.approx(5 / 252.5)
    assert bars.Figures([{**row, "k": 1, "mode": "c", "us": [9.0]}]).graph_step(
        "lenet", 1
    ).seconds == pytest.approx(9e-6)


def test_floor_is_the_best_way_by_its_median_and_failures_are_no_time(bars):
    row = {"kind": "yardstick", "file": "floor", "m": "resnet18", "batch": 256, "prec": "bf16w", "k": 1}
    fast = {**row, "fmt": "channels_last", "compile": True, "bench": True, "graph": True}
    slow = {**row, "prec": "bf16", "fmt": "contiguous", "compile": False, "bench": True, "graph": True}
    rows = [
        {**fast, "us": 3500.0}, {**fast, "us": 3520.0}, {**fast, "us": 3540.0}, {**slow, "us": 3530.0},
        {**slow, "bench": False, "us": "OutOfMemoryError"}, {**slow, "batch": 64, "us": 1.0},
    ]  # fmt: skip
    figures = bars.Figures(rows)
    assert figures.floor_step("resnet18", 256).seconds == pytest.approx(3520e-6)
    assert figures.floor_step("resnet18", 256, "bf16").seconds == pytest.approx(3530e-6)
    assert figures.floor_step("resnet18", 256).of.endswith("bf16w channels_last compile bench graph")


def test_every_bar_of_the_table_is_there_once(bars):
    names = [bar.name for bar in bars.gpu_bars()]
    assert len(names) == len(set(names))
    # LeNet: 8; ResNet-18: 4 against peers, 1 over k, 1 against the floor, 3 of math over loose, 3 in TF32.
    assert sum(bar.judged for bar in bars.gpu_bars()) == 20


def test_cpu_is_not_slower_within_half_the_spread(result):
    row = {
        "kind": "case",
        "part": "cpu-lenet",
        "work": "lenet-epoch",
        "k": 1,
        "ratio_spread": 0.04,
        "settled": True,
    }
    near, slower = (result.cpu_checks([{**row, "ratio": ratio}])[0] for ratio in (1.019, 1.021))
    assert (near["passed"], slower["passed"]) == (True, False)
    assert result.cpu_checks([])[0]["passed"] is None


def test_starts_are_judged_by_ratio_on_the_cpu_and_by_their_slowest_on_gpus(result):
    cpu = {"kind": "start", "part": "cpu-start", "device": "cpu", "k": 2, "ratio": 1.31, "ratio_spread": 0.01}
    gpu = {"kind": "start", "part": "start", "device": "cuda", "k": 4, "kway_s": 12.0}
    rounds = {"s_of_rounds": {"kway": [11.0, 12.0, 15.5]}}
    found = result.start_checks([cpu, {**gpu, **rounds}])
    assert [check["passed"] for check in found] == [False, False]


def test_rows_of_two_machines_or_of_two_hours_do_not_pass(result):
    def machine(uuid, at):
        return {"part": "machine", "at": at, "versions": {}, "k": 1, "cluster": {"gpus": [{"uuid": uuid}]}}

    assert [c["passed"] for c in result.machine_checks([machine("a", 0.0), machine("a", 3600.0)])] == [
        True,
        True,
    ]
    assert [c["passed"] for c in result.machine_checks([machine("a", 0.0), machine("b", 3601.0)])] == [
        False,
        False,
    ]
    whole = machine("a", 0.0)
    whole["cluster"] = {"gpus": [{"uuid": "a"}, {"uuid": "b"}]}
    # Parts that saw one GPU each, of a machine with two.
    assert result.machine_checks([machine("a", 0.0), whole, machine("b", 1.0)])[0]["passed"]
    # The comparisons on the CPU are of another machine, and compared within themselves.
    other = {**machine("b", 9999.0), "part": "machine-cpu"}
    assert [c["passed"] for c in result.machine_checks([machine("a", 0.0), other])] == [True, True]


def test_summary_fails_for_a_miss_and_for_what_has_not_settled(result):
    def ok(own, spread=0.01):
        rows = [
            trained("lenet", 1, own, spread=spread),
            peer("DDP fp32 resident lenet", 1, 9.0, 0.50, 0.51, 0.49),
        ]
        here = {"part": "machine", "k": 1, "at": 100.0, "versions": {}, "cluster": {"gpus": []}}
        data, table, fine = result.summarise([here, *rows])
        assert "kway lenet:fp32:loose:compiled-graph:channels_last" in table
        assert len(data["kway"]) == len(data["others"]) == 1
        return fine

    assert ok(0.05)
    assert not ok(0.20)
    assert not ok(0.05, spread=UNSETTLED)
