import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

DATA, YARDSTICK = Path("data"), Path("yardstick")


@pytest.fixture
def plan(module_of):
    return module_of("speed", "plan")


def test_rows_of_a_script_are_passed_on_line_by_line(module_of, capsys):
    rows = module_of("speed", "yardstick_part").Rows
    out = io.StringIO()
    stream = rows(out, file="graph")
    # The way print and a chatty library write: pieces, several lines at once, lines that are no rows.
    for text in ('{"m": "le', 'net", "us": [1.5]}\nc RuntimeError\n[1]\n', '{"m": "b"}'):
        stream.write(text)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"kind": "yardstick", "file": "graph", "m": "lenet", "us": [1.5]}
    ]
    assert capsys.readouterr().err == "c RuntimeError\n[1]\n"
    stream.write("\n")
    assert json.loads(out.getvalue().splitlines()[1])["m"] == "b"


def test_floor_takes_every_way_of_the_script_once_and_graphs_first(module_of):
    ways = module_of("speed", "yardstick_part").ways(["bf16", "fp32"])
    # Two precisions, two formats, graph or not; of compiled and benchmarked, three pairs.
    assert len(ways) == len(set(ways)) == 2 * 2 * 2 * 3
    assert ways[0] == ("bf16", "channels_last", True, True, True)
    assert not any(compiled and not bench for _, _, compiled, bench, _ in ways)
    assert all(graph for *_, graph in ways[:12])


def test_a_way_is_five_words(module_of):
    part = module_of("speed", "kway_part")
    way = part.way_of("lenet:fp32:loose:graph:contiguous")
    assert (way.model, way.step_kind, str(way)) == ("lenet", "graph", "lenet:fp32:loose:graph:contiguous")
    for text in ("lenet:fp32:loose:graph", "vgg:fp32:loose:graph:contiguous", "lenet:fp32:loose:graph:nchw"):
        with pytest.raises(ValueError, match="MODEL:PRECISION"):
            part.way_of(text)


def test_step_kinds_are_asked_for_where_there_are_any(module_of):
    step_kind = module_of("speed", "kway_part").step_kind

    def with_kinds(job, *, step_kind="eager"): ...
    def without(job): ...

    assert step_kind(with_kinds, "graph") == {"step_kind": "graph"}
    assert step_kind(without, "eager") == {}
    with pytest.raises(LookupError, match="'graph' cannot be asked for"):
        step_kind(without, "graph")


def test_every_planned_way_can_be_read(module_of, plan):
    part = module_of("speed", "kway_part")
    for ways in [*plan.WAYS.values(), plan.SMOKE_WAYS]:
        assert {part.way_of(way).step_kind for way in ways} <= set(plan.KINDS)


def test_parts_by_number_of_gpus(plan):
    names = {k: [part.name for part in plan.gpu_parts(k, DATA, YARDSTICK)] for k in (1, 2, 4)}
    assert names[2] == ["machine", "kway-lenet", "peers", "kway-resnet18", "graph"]
    assert names[4] == [*names[2], "scratch", "start"]
    assert names[1] == [*names[2], *plan.FLOOR]
    eager = plan.gpu_parts(2, DATA, YARDSTICK, ["eager"])[1]
    assert [word for word in eager.command if ":" in word] == ["lenet:fp32:loose:eager:contiguous"]


def test_only_what_has_not_settled_is_measured_again(plan):
    lenet = next(part for part in plan.gpu_parts(2, DATA, YARDSTICK) if part.name == "kway-lenet")

    def row(way, spread):
        return {"kind": "train", "way": way, "epoch_s_spread": spread}

    first, second = plan.WAYS["kway-lenet"][:2]
    rows = [row(first, 0.2), row(second, 0.01)]
    more = plan.again(lenet, 2, rows, DATA)
    assert [word for word in more.command if word.startswith("lenet:")] == [first]
    assert plan.again(lenet, 2, [*rows, row(first, 0.03), row(first, 0.3)], DATA) is None


def test_a_graph_that_was_read_once_is_read_again(plan):
    graph = next(part for part in plan.gpu_parts(2, DATA, YARDSTICK) if part.name == "graph")
    row = {"kind": "yardstick", "m": "lenet", "mode": "cr", "us": [200.0, 210.0]}
    assert plan.again(graph, 2, [row], DATA) is graph
    assert plan.again(graph, 2, [row, {**row, "us": [205.0, 212.0]}], DATA) is None
    # One that failed will fail again.
    assert plan.again(graph, 2, [{**row, "us": [-1.0, -1.0]}], DATA) is None


def test_peers_are_read_again_where_one_swings(plan):
    peers = next(part for part in plan.gpu_parts(1, DATA, YARDSTICK) if part.name == "peers")
    row = {"kind": "yardstick", "what": "DDP", "all": [9.0, 0.50, 0.51]}
    assert plan.again(peers, 1, [row], DATA) is None
    assert plan.again(peers, 1, [row, {**row, "what": "Fabric", "all": [9.0, 0.5, 0.6]}], DATA) is peers


def test_start_ratio_is_the_median_over_rounds(module_of):
    row = module_of("speed", "starts").start_row(
        {"kway": [2.0, 3.0, 9.0], "by hand": [2.0, 2.0, 3.0]}, device="cpu"
    )
    assert (row["ratio"], row["kway_s"], row["by_hand_s"], row["device"]) == (1.5, 3.0, 2.0, "cpu")


@pytest.mark.starts
def test_a_start_is_timed_to_the_line_and_a_failed_one_is_an_error(module_of):
    seconds_until = module_of("speed", "starts").seconds_until
    quick = [
        sys.executable,
        "-S",
        "-c",
        "import time; print('a'); print('devices 2', flush=True); time.sleep(0.3)",
    ]
    begun = time.perf_counter()
    seconds = seconds_until(quick, "devices ")
    # What comes after the line is waited for and not counted.
    assert time.perf_counter() - begun - seconds > 0.25
    with pytest.raises(RuntimeError, match="exit code 0"):
        seconds_until([sys.executable, "-S", "-c", "print('done')"], "devices ")
    with pytest.raises(RuntimeError, match="exit code 3"):
        seconds_until([sys.executable, "-S", "-c", "print('devices'); raise SystemExit(3)"], "devices")


@pytest.mark.starts
def test_rows_of_a_part_are_kept_with_where_they_come_from(module_of, tmp_path):
    parts = module_of("speed", "plan").Part
    run = module_of("speed", "parts").run
    script = tmp_path / "part.py"
    script.write_text("print('noise'); print('{\"kind\": \"x\"}', flush=True); raise SystemExit('broken')")
    file = tmp_path / "out.rows.jsonl"
    rows = run(parts("name", [str(script)], 30), 2, file, 30.0)
    assert [(row["k"], row["part"], row["kind"]) for row in rows] == [(2, "name", "x"), (2, "name", "end")]
    assert (rows[1]["exit_code"], rows[1]["last_words"].strip()) == (1, "broken")
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows


ANCHORS = """
def resnet18(): return "network"
def LeNet(): return "network"
"""
GRAPH = """
import json, os
from anchors import LeNet, resnet18
for name, make in (("resnet18", resnet18), ("lenet", LeNet)):
    try:
        make(); us = 1.5
    except Exception as error:
        us = -1.0; print("cr", repr(error), flush=True)
    print(json.dumps(dict(m=name, k=1, mode="cr", us=[us])), flush=True)
os._exit(0)
"""
FLOOR = """
from anchors import resnet18
calls = []
def step_us(make, batch, precision, form, compiled, bench, graph):
    assert make is resnet18 and batch == 256 and str(form).startswith("torch.")
    if not bench: raise MemoryError("none left")
    calls.append(precision)
    return 2.0 if (compiled and graph) else 9.0
"""


@pytest.fixture
def yardstick(tmp_path):
    for name, text in (("anchors", ANCHORS), ("graph", GRAPH), ("floor", FLOOR)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.fixture
def rows_of(yardstick, forked_commands):
    script = Path(__file__).resolve().parents[2] / "benchmarks/speed/yardstick_part.py"

    def rows(*arguments):
        command = [sys.executable, str(script), str(yardstick), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    return rows


@pytest.mark.starts
def test_graph_runs_for_lenet_alone(rows_of):
    found = rows_of("graph")
    assert [(row["m"], row["us"], row["file"]) for row in found] == [
        ("resnet18", [-1.0], "graph"),
        ("lenet", [1.5], "graph"),
    ]


@pytest.mark.starts
def test_floor_takes_the_best_twice_more_and_goes_on_after_a_failure(rows_of):
    found = rows_of("floor", "--precisions", "bf16")
    # Six ways a format, of which two fail; the best twice more.
    assert len(found) == 12 + 2
    assert sum(str(row["us"]).startswith("MemoryError") for row in found) == 4
    assert [row["us"] for row in found[-2:]] == [2.0, 2.0]
    assert found[-1] == found[-2] == found[0]
