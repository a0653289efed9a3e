"""Ranks that something else started, each told by its own script: they must be told the same."""

import pytest
from tests.joined import on_two_ranks

SCRIPT = """
import os, sys, torch, kway

rank = int(os.environ["RANK"])
what = sys.argv[1] if rank else ""
x = torch.randn(12, 3, generator=torch.Generator().manual_seed(int(what == "data")))
held = None if what == "validation" else (x, x[:, :1])
job = kway.Job(
    torch.nn.Linear(3, 1), torch.nn.MSELoss(), torch.optim.SGD, (x, x[:, :1]), validation=held,
    batch_size=4 if what == "batch" else 8,
)
try:
    kway.train(job, devices="cpu:2", epochs=2 if what == "epochs" else 1, echo=False)
except kway.UsageError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands", "leftovers")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("batch", "batch_size 4 on rank 1, 8 on rank 0"),
        ("data", "samples, digest"),
        ("validation", "validation None on rank 1"),
        ("epochs", "epochs 2 on rank 1, 1 on rank 0"),
        ("", ""),
    ],
)
def test_ranks_that_were_told_otherwise_end_before_the_first_step(tmp_path, what, said):
    path = tmp_path / "joins.py"
    path.write_text(SCRIPT)
    codes, printed = on_two_ranks(str(path), what)
    assert codes == [2 if what else 0] * 2
    assert all(said in text for text in printed), printed
