"""Tables and pictures of measurements that are made up."""

import pytest
from matplotlib.image import imread
from tests.measuring.test_figures import ENTRY, record

from kway.measuring.figure import Maker
from kway.report import measured, measured_plots
from kway.report.measured import Curve, lines_of, panels, shown, size_text
from kway.report.measured_plots import band, distinct, draw, frame, label
from kway.units import rate_text

MAKE = Maker("compute")


def products(device, rate, limit=None):
    return [
        MAKE.timed(
            "product", {"device": device, "n": n}, "FLOP/s", [1 / (rate * n)], lambda s: 1 / s, limit
        ).to_dict()
        for n in (256, 1024, 4096)
    ]


def crossing():
    return MAKE.computed("product: crossing", {"marks": "product", "device": "cuda:0"}, "n", 612.4).to_dict()


def test_a_table_has_a_row_a_curve_and_a_column_a_size():
    launch = MAKE.timed("launch", {"device": "cpu"}, "s", [7.5e-6]).to_dict()
    lines = lines_of(record(*products("cpu", 1e7), *products("cuda:0", 1e9, 8e12), crossing(), launch))
    text = "\n".join(lines)
    rows = [line.split() for line in lines]
    assert ["device", "256", "1,024", "4,096", "spread", "limit", "of", "it"] in rows
    assert next(row for row in rows if row[:1] == ["cuda:0"])[-3:] == ["8", "TFLOP/s", "51%"]
    assert "cuda:0: less time from n = 612 on" in text
    assert "7.5 us" in text


def test_what_is_remembered_or_left_says_so():
    held = ENTRY | {"how": "remembered", "age_s": 7200.0}
    assert "as measured 2 h 00 min ago" in lines_of(record(entries=[held]))[0]
    assert (
        lines_of(record(entries=[ENTRY | {"how": "left", "why": "no GPU"}]))[0]
        == "compute: not measured: no GPU"
    )


def test_the_parameter_with_most_values_runs():
    (panel,) = panels([*products("cpu", 1.0), *products("cuda:0", 1.0), crossing()])
    assert (panel.size, panel.sizes, len(panel.curves), len(panel.marks)) == ("n", [256, 1024, 4096], 2, 1)


def test_columns_are_thinned_with_both_ends_kept():
    assert shown(list(range(10)), 4) == [0, 3, 6, 9]
    assert shown([1, 2]) == [1, 2]


def test_curves_of_equal_gpus_are_drawn_once():
    (panel,) = panels([row for device in ("cpu", "cuda:0", "cuda:1") for row in products(device, 1.0)])
    assert [curve.parameters["device"] for curve in distinct(panel.curves)] == ["cpu", "cuda:0"]


def test_a_curve_that_a_number_tells_apart_says_of_what():
    curves = [Curve({"collective": "all-reduce", "ranks": ranks}) for ranks in (2, 3)]
    assert [label(curve, {}) for curve in curves] == ["all-reduce ranks 2", "all-reduce ranks 3"]
    assert label(Curve({"from": "cpu", "to": "cuda:0", "n": 4}), {}) == "cpu to cuda:0 n 4"
    assert label(curves[0], curves[0].parameters) == "measured"


def test_a_picture_is_as_wide_as_can_be_read(tmp_path):
    (path,) = draw(record(*products("cpu", 1e7), *products("cuda:0", 1e9, 8e12), crossing()), tmp_path)
    assert path == tmp_path / "compute.png"
    image = imread(path)[..., :3]
    assert image.shape[1] == 1200
    # Nothing is cut off at the edges.
    assert (image[:, :4] == 1).all()
    assert (image[:, -4:] == 1).all()
    assert (image < 0.9).any()


@pytest.mark.parametrize("how", ["measured", "remembered"])
def test_the_title_of_a_picture_is_not_cut(tmp_path, monkeypatch, how):
    figures = []
    monkeypatch.setattr(measured_plots, "write_png", lambda figure, path: figures.append(figure))
    entry = ENTRY | {"how": how, "age_s": 1.2e5}
    figure = record(*products("cpu", 1e7), entries=[entry])
    draw(figure, tmp_path)
    (drawn,) = figures
    title = drawn.texts[0]
    assert title.get_text() == (
        "compute (quick): measured on 2026-11-29 12:00 (UTC)"
        if how == "remembered"
        else "compute (quick): measured in 1 s"
    )
    # With a name of a few more letters, too.
    assert title.get_window_extent().x1 < 0.9 * drawn.bbox.x1


def shares(*values, spread):
    return [
        MAKE.computed("hidden", {"n": n}, "%", value, spread).to_dict()
        for n, value in zip((1, 2, 3), values, strict=True)
    ]


def test_a_band_is_as_wide_as_the_spread_and_the_frame_as_the_curve():
    """A band that is cut to half the value would say that a share of about 0 is known best of all."""
    slow = MAKE.timed("product", {"n": 1}, "s", [1.0, 1.0, 9.0, 9.0, 9.0]).to_dict() | {"spread": 6.0}
    assert band(slow) == (0.09, 36.0)
    assert frame([slow]) == (4.5, 13.5)
    near_0, below = shares(2.0, -50.0, 0.0, spread=100.0)[:2]
    assert band(near_0) == (-98.0, 102.0)
    assert band(below) == (-2550.0, 2450.0)
    assert frame([near_0, below]) == (-75.0, 3.0)
    limited = MAKE.timed("product", {"n": 1}, "s", [1.0], limit=8.0).to_dict()
    assert frame([limited])[1] == 8.0


def test_a_picture_of_shares_about_0_shows_how_uncertain_they_are(tmp_path):
    """One that is far more uncertain than it is large fills its panel, and no value leaves it."""
    sure, unsure = (
        imread(draw(record(*shares(90.0, -1.0, 1.0, spread=spread)), tmp_path)[0])[..., :3]
        for spread in (0.01, 200.0)
    )
    assert sure.shape == unsure.shape
    assert (unsure < 0.95).mean() > 2 * (sure < 0.95).mean()


def test_the_spread_of_shares_is_in_points():
    (line,) = [line for line in lines_of(record(*shares(0.0, -0.5, 80.0, spread=2.0))) if "points" in line]
    assert line.split() == ["0", "%", "-0.5", "%", "80", "%", "160", "points"]


def test_nothing_with_several_sizes_is_no_picture(tmp_path):
    assert draw(record(MAKE.timed("launch", {"device": "cpu"}, "s", [1.0]).to_dict()), tmp_path) == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (9.82e10, "FLOP/s", "98.2 GFLOP/s"),
        (999.6e9, "B/s", "1 TB/s"),
        (512.0, "B/s", "512 B/s"),
        (1e-5, "s", "10.0 us"),
        (83.2, "n", "83.2 n"),
        (2e19, "B/s", "20000 PB/s"),
    ],
)
def test_rates_are_written_in_decimal_prefixes(value, unit, text):
    assert rate_text(value, unit) == text


def test_sizes_are_written_in_their_way():
    assert [size_text("bytes", 1024), size_text("n", 4096), size_text("n", 4)] == ["1.0 KiB", "4,096", "4"]


def test_tables_and_panels_beyond_the_first_are_named(tmp_path, monkeypatch):
    for module in (measured, measured_plots):
        monkeypatch.setattr(module, "MOST_PANELS", 2)
    figures = [
        MAKE.timed(f"product {number}", {"n": n}, "s", [1.0]).to_dict() for number in range(4) for n in (1, 2)
    ]
    text = "\n".join(lines_of(record(*figures)))
    assert "product 1, by n" in text
    assert "product 2, by n" not in text
    assert "also in measurements.json: product 2; product 3" in text
    (path,) = draw(record(*figures), tmp_path)
    (few,) = draw(record(*figures[:4]), tmp_path)
    assert imread(path).shape == imread(few).shape


def test_a_mark_that_is_no_crossing_says_what_it_is():
    make = Maker("compute")
    rates = [make.timed("loader", {"workers": n}, "samples/s", [1.0]).to_dict() for n in (0, 1, 2)]
    knee = make.computed("loader: knee", {"marks": "loader", "at": "knee"}, "workers", 1, notes=("knee",))
    assert "  knee: workers = 1" in lines_of(record(*rates, knee.to_dict()))
