"""Inside ranks that another launcher started, rank 0 tells the trackers, and shows progress."""

import pytest
from tests.joined import on_two_ranks

SCRIPT = """
import os, torch, kway

class Loud:
    def begin(self, config): print("begin", config["devices"])
    def log(self, metrics, step): print("log", step, *sorted(metrics))
    def end(self, status): print("end", status)

x = torch.arange(24.0).view(8, 3) / 24
job = kway.Job(torch.nn.Linear(3, 1), torch.nn.MSELoss(), torch.optim.SGD, (x, x[:, :1]), batch_size=8)
kway.train(job, devices="cpu:2", epochs=1, log_every=1, trackers=[Loud()], progress=True, echo=False)
print("left", os.environ["RANK"])
"""


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands", "leftovers")
def test_rank_0_alone_speaks(tmp_path):
    path = tmp_path / "joins.py"
    path.write_text(SCRIPT)
    codes, printed = on_two_ranks(str(path))
    assert codes == [0, 0]
    first, second = (text.splitlines() for text in printed)
    assert second == ["left 1"]
    said = [line for line in first if not line.startswith(("epoch ", "1 epoch"))]
    assert said == [
        "begin 2",
        "log 1 train/loss train/samples_per_s",
        "log 1 epoch/lr epoch/samples_per_s epoch/seconds epoch/train_loss",
        "end finished",
        "left 0",
    ]
    assert sum(line.startswith("epoch 1/1 ") for line in first) == 1
