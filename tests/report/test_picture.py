"""Pictures under their names only when they are whole."""

import errno

import pytest
from tests.measuring.test_figures import record
from tests.report.test_curves import epoch, training
from tests.report.test_measured import products
from tests.workloads import workload

from kway.cli.main import main
from kway.errors import UsageError
from kway.measurements import Measurements
from kway.report import curves, measured_plots, workload_plots

FULL = OSError(errno.ENOSPC, "No space left on device")


DRAWN = {
    "curves": lambda folder: curves.draw(training([epoch(1)]), folder / "curves.png"),
    "measured": lambda folder: measured_plots.draw(record(*products("cpu", 1e7)), folder),
    "workload": lambda folder: workload_plots.draw(workload(), folder),
}


@pytest.mark.parametrize("end", [FULL, KeyboardInterrupt()], ids=["full", "interrupted"])
@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
@pytest.mark.usefixtures("drawn")
def test_a_picture_that_is_not_whole_is_none(tmp_path, monkeypatch, draw, end):
    def cut_short(self, file, **more):
        (file.write if hasattr(file, "write") else file.write_bytes)(b"\x89PNG")
        raise end

    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", cut_short)
    with pytest.raises((UsageError, KeyboardInterrupt)):
        draw(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_figures_are_kept_where_there_is_no_room_for_their_picture(tmp_path, monkeypatch, capsys):
    def full(path, content):
        raise FULL

    monkeypatch.setattr("kway.report.picture.write_atomically", full)
    monkeypatch.setattr("kway.jobs.measuring.measure", lambda **options: record(*products("cpu", 1e7)))
    out = tmp_path / "out"
    assert main(["measure", "--out", str(out)]) == 2
    assert f"cannot write {out}/compute.png: No space left on device" in capsys.readouterr().err
    assert len(Measurements.load(out).figures) == 3
