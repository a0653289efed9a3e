"""``kway measure``: one real run in small, what is remembered of it, and what is refused."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from matplotlib.image import imread

import kway
from kway.cli.main import main
from kway.devices.torch_facts import cache_folder
from kway.measurements import Measurements
from kway.measuring.budget import LEAST
from kway.measuring.experiment import experiments
from kway.measuring.timer import Policy
from kway.units import seconds_text


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and figures that are real and rough."""
    monkeypatch.setattr("kway.jobs.measuring.QUICK", Policy(rounds=3, tries=1, sample_s=1e-4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder() / "measured"


def test_a_run_is_recorded_drawn_and_remembered(tmp_path, capsys, cache):
    out = tmp_path / "first"
    assert main(["measure", "--quick", "--only", "copies", "--devices", "cpu", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "copy, by bytes" in text
    assert f"wrote      {out}/: measurements.json, copies.png" in text
    record = Measurements.load(out)
    assert [entry["how"] for entry in record.experiments] == ["measured"]
    assert record.find("copies", "copy", bytes=1024)[0]["value"] > 0
    assert imread(out / "copies.png").shape[1] >= 800
    (kept,) = cache.rglob("*.json")

    held = json.loads(kept.read_text())
    held["entry"]["made"] = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    kept.write_text(json.dumps(held))
    again = kway.measure(devices="cpu", only="copies", quick=True)
    assert again.figures == record.figures
    assert again.experiments[0]["how"] == "remembered"
    assert 3600 <= again.age_s < 4000

    kept.write_text(kept.read_text().replace('"raw"', '"cooked"'))
    fresh = kway.measure(devices="cpu", only="copies", quick=True)
    assert fresh.experiments[0]["how"] == "measured"


@pytest.mark.usefixtures("cache")
def test_what_was_measured_beside_others_says_so_when_it_is_remembered(monkeypatch):
    options = {"devices": "cpu", "only": "copies", "quick": True, "seconds": 0.0}
    with monkeypatch.context() as moment:
        moment.setattr("kway.devices.busy.taken", lambda usable: "1.8 of 2 processors")
        first = kway.measure(**options)
    again = kway.measure(**options)
    for record in (first, again):
        assert record.experiments[0]["busy"] == "1.8 of 2 processors"
    assert first.notices[0].startswith("other programs keep 1.8 of 2 processors busy")
    assert again.notices[0].startswith("copies: measured while other programs kept 1.8 of 2 processors busy")
    fresh = kway.measure(refresh=True, **options)
    assert fresh.experiments[0]["busy"] == ""
    assert not any("other programs" in line for line in fresh.notices)


@pytest.mark.usefixtures("cache")
def test_a_short_look_announces_what_it_takes():
    said = []
    options = {"devices": "cpu", "only": "copies", "quick": True, "say": said.append}
    in_haste = kway.measure(**options, seconds=0.0)
    usual = kway.measure(**options, refresh=True)
    hasty, whole = (line for line in said if line.startswith("copies: "))
    planned = experiments()["copies"].budget(True, 0).cpu
    assert hasty.endswith(f", about {seconds_text(LEAST * planned)}")
    assert whole.endswith(f", about {seconds_text(planned)}")
    assert in_haste.experiments[0]["how"] == usual.experiments[0]["how"] == "measured"


def test_json_is_the_record_and_nothing_else(tmp_path, capsys, cache):
    words = [
        "measure",
        "--quick",
        "--only",
        "offload",
        "--devices",
        "cpu",
        "--json",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    record = Measurements.from_dict(json.loads(capsys.readouterr().out))
    assert (record.experiments[0]["how"], record.figures) == ("left", [])
    assert "it needs a device of type cuda" in record.notices[0]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--only", "copys"], "unknown experiment 'copys'"),
        (["--devices", "gpu"], "device set 'gpu'"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, complaint, tmp_path, capsys):
    assert main(["measure", *words, "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ranks_of_a_launch_do_not_measure_each_other(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    with pytest.raises(kway.UsageError, match="they would measure each other"):
        kway.measure(only="copies", quick=True)
