"""What kway refuses for a reason is an error that names the reason, whatever it is asked of, and nothing offers it."""

from pathlib import Path

import pytest
import torch

import kway
from kway.cli._grammar import grammar
from kway.cli.main import main
from kway.registry import _REFUSED, unknown

DECISIONS = Path(__file__).parents[1] / "docs/decisions"


@pytest.mark.parametrize(
    ("flags", "decision"),
    [
        (["--strategy", "fedavg"], "0030"),
        (["--strategy", "local-sgd=2"], "0030"),
        (["--settings", "compression=fp16"], "0031"),
        (["--settings", "powersgd=2"], "0031"),
        (["--precision", "fp8"], "0032"),
        (["--precision", "float8_e4m3fn"], "0032"),
    ],
)
def test_the_command_line_says_why(flags, decision, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "mlp", "--devices", "cpu:2", *flags]) == 2
    said = capsys.readouterr().err
    assert "kway refuses it" in said
    assert f"docs/decisions/{decision}" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"strategy": "FedAvg"}, {"settings": {"gradient_compression": "fp16"}}])
def test_python_says_why(options, tmp_path):
    x = torch.zeros(8, 2)
    job = kway.Job(torch.nn.Linear(2, 1), torch.nn.MSELoss(), torch.optim.SGD, (x, x[:, :1]))
    with pytest.raises(kway.UsageError, match="kway refuses it"):
        kway.train(job, devices="cpu:2", epochs=1, echo=False, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_every_reason_has_its_decision_and_no_flag_offers_it():
    for name, (need, do) in _REFUSED.items():
        number = need.rpartition("docs/decisions/")[2].rstrip(")")
        assert len(list(DECISIONS.glob(f"{number}-*.md"))) == 1
        assert do
        flags = {flag.lstrip("-").replace("-", "") for c in grammar() for f in c.flags for flag in f.names}
        assert name not in flags


def test_other_names_are_unknown_as_before():
    assert "known are a, b" in str(unknown("thing", "fp9", ["a", "b"]))
