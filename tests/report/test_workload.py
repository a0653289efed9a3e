"""A workload as tables and as a picture."""

from dataclasses import replace

import pytest
from matplotlib.image import imread
from tests.workloads import FIXED_S, PER_SAMPLE_S, workload

from kway.errors import UsageError
from kway.report.workload import by_layer, lines_of
from kway.report.workload_plots import draw


def layer(name, seconds, **more):
    line = {"fixed_s": seconds, "per_sample_s": 0.0}
    return {**workload().layers[0], "name": name, "forward": line, "backward": line, **more}


def test_a_layer_shows_its_time_over_the_whole_batch():
    (row,) = by_layer(workload((32, 64)))
    assert row.forward_s == pytest.approx(0.3 * (FIXED_S + 64 * PER_SAMPLE_S))
    assert row.backward_s == pytest.approx(0.6 * (FIXED_S + 64 * PER_SAMPLE_S))
    assert row.fixed_s == pytest.approx(0.9 * FIXED_S)
    assert (row.flop, row.kept_bytes) == (6_000 * 64, 2_000 * 64)


def test_layers_that_take_least_are_one_row_and_the_order_stays():
    record = replace(workload(), layers=[layer(f"l{place}", float(place)) for place in (3, 1, 4, 2)])
    rows = by_layer(record, 3)
    assert [row.name for row in rows] == ["l3", "l4", "(2 others)"]
    assert rows[-1].seconds == 2 * (1 + 2)
    assert sum(row.seconds for row in rows) == sum(row.seconds for row in by_layer(record))
    assert (
        by_layer(replace(record, layers=[*record.layers[:3], layer("x", 0.5, flop_per_sample=None)]), 3)[
            2
        ].flop
        is None
    )


def test_tables_say_what_is_there():
    record = replace(
        workload(threads=(2,)), step_kinds_left={"graph": "it needs a CUDA device"}, notices=["mind"]
    )
    record.parameters["tied"].append("head.weight")
    text = "\n".join(lines_of(record))
    for said in (
        "eager", "13.8 ms", "fc", "compute", "800 B a sample", "tied       head.weight", "2 small collectives",
        "left       graph: it needs a CUDA device", "note       mind", "1,000 of float32",
    ):  # fmt: skip
        assert said in text, said
    assert "operations not counted" in "\n".join(lines_of(replace(record, flop_per_sample=None)))


def test_a_picture_is_wide_enough_and_one_that_cannot_be_written_says_so(tmp_path):
    many = replace(
        workload(), layers=[layer(f"a.very.long.name.of.a.layer.{place}", 1.0) for place in range(40)]
    )
    assert imread(draw(many, tmp_path)).shape[1] >= 800
    assert imread(draw(replace(many, layers=[]), tmp_path)).shape[1] >= 800
    with pytest.raises(UsageError, match="cannot write"):
        draw(many, tmp_path / "nowhere")
