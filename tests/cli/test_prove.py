"""``kway prove`` on a Job of the user's own."""

import json

from kway.cli.main import main

SOURCE = """
import kway, torch

x = torch.randn(8, 3)
job = kway.Job(torch.nn.Linear(3, 1), torch.nn.MSELoss(), torch.optim.AdamW, data=(x, x[:, :1]), batch_size=8)
"""


def test_a_job_s_own_optimizer_is_named_where_another_one_is_proved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)

    def proof(*flags):
        assert main(["prove", "own.py:job", "--devices", "cpu:1", "--steps", "1", "--json", *flags]) == 0
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    record, said = proof("--out", "sgd")
    assert record["job"]["optimizer"]["name"] == "SGD"
    assert "instead of the job's AdamW" in said
    assert "optimizer from the command line" not in said
    record, said = proof("--out", "adam", "--optimizer", "adam")
    assert record["job"]["optimizer"]["name"] == "Adam"
    assert "instead" not in said
