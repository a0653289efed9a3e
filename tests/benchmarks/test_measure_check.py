import json

import pytest
from tests.measured import entry

from kway.errors import UsageError
from kway.measurements import Measurements
from kway.measuring.timer import Policy


@pytest.fixture
def check(module_of):
    return module_of("measure", "check")


@pytest.fixture
def repeat(module_of):
    return module_of("measure", "repeat")


def figure(value, spread=0.1, name="copy", **parameters):
    return {
        "experiment": "copies", "name": name, "parameters": parameters, "unit": "s", "value": value, "spread": spread,
        "raw": [], "limit": None, "share": None, "notes": [],
    }  # fmt: skip


def record(figures):
    return Measurements({}, {}, ["cpu"], True, "", 0.0, 0.0, [entry("copies")], figures)


def test_figures_agree_where_their_spreads_overlap(repeat):
    before = [
        figure(100.0, n=1),
        figure(100.0, n=2),
        figure(100.0, n=3),
        figure(1.0, None, n=4),
        figure(1.0, n=5),
    ]
    now = [
        figure(119.0, n=1),
        figure(140.0, n=2),
        figure(100.0, 0.0, n=3),
        figure(9.0, 0.1, n=4),
        figure(1.0, n=6),
    ]
    found = repeat.pairs(before, now)
    # 40 apart, where 10% of 100 and of 140 are allowed; then 19 where 10 and 11.9 are.
    assert [(pair.now, pair.apart) for pair in found] == [
        (140.0, pytest.approx(40 / 24)), (119.0, pytest.approx(19 / 21.9)), (100.0, 0.0),
    ]  # fmt: skip
    assert repeat.agreeing(found) == pytest.approx(2 / 3)
    assert repeat.agreeing([]) == 0.0


def test_the_share_and_the_worst_are_told(check):
    before = record([figure(1.0, n=n) for n in range(10)])
    data, text = check.compared(before, record([figure(2.0 if n == 7 else 1.0, n=n) for n in range(10)]))
    assert (data["share"], data["figures"], len(data["worst"])) == (0.9, 10, 1)
    assert "90.0% of 10 figures agree" in text
    assert "copies: copy (n 7): 1, then 2: 3.3 times" in text


@pytest.mark.parametrize(("value", "passed"), [(0.96, False), (0.98, True), (1.02, True), (1.04, False)])
def test_a_figure_passes_close_to_what_is_timed_by_hand(check, value, passed):
    case = check.Case("x", 0.03, ("copies", "copy"), {"n": 1}, lambda: 1.0)
    row = check.held(record([figure(value, n=1)]), case)
    assert (row.ratio, row.passed) == (value, passed)
    assert ("MISSED" in check.table([row])) is not passed


def test_what_was_not_measured_is_told(check):
    case = check.Case("x", 0.03, ("copies", "copy"), {"n": 2}, lambda: 1.0)
    row = check.held(record([figure(1.0, n=1)]), case)
    assert row.passed is None
    assert "NOT MEASURED" in check.table([row])


def test_on_gpus_four_figures_are_held(check):
    found = check.cases(4, 2, smoke=False)
    assert [case.most for case in found] == [0.03, 0.05, 0.05, 0.03]
    assert found[-1].figure == ("collectives", "bus bandwidth, nccl on 4 GPUs")
    assert found[-1].parameters["bytes"] == 1 << 30
    assert len(check.cases(1, 2, smoke=False)) == 3


def test_without_a_gpu_nothing_is_judged(check, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU here"):
        check.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.starts
def test_it_runs_on_cpu(check, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kway.jobs.measuring.QUICK", Policy(rounds=3, tries=1, sample_s=1e-4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # So uncertain that any machine agrees with it.
    before = record([figure(1.0, 1e18, **{"from": "cpu", "to": "cpu", "memory": "pageable", "bytes": 1024})])
    before.save(tmp_path)
    out = tmp_path / "out"
    assert check.main(["--smoke", "--out", str(out), "--repeat-after", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "100.0% of 1 figures agree" in text
    data = json.loads((out / "check.json").read_text())
    assert [row["name"].split(",")[0] for row in data["rows"]] == ["product", "copy cpu", "all-reduce"]
    for row in data["rows"]:
        assert row["ratio"] == pytest.approx(row["kway"] / row["hand"])
        # The same work: far from another unit (1000 times as much) or a clock that does not wait. Two processes that
        # find no processor together, as on a machine that others use, take thirty times as long as the best of ten.
        most = 300 if row["name"].startswith("all-reduce") else 20
        assert 1 / most < row["ratio"] < most
    assert Measurements.load(out).find("collectives", "bus bandwidth, gloo on 2 CPU ranks", bytes=1 << 24)
