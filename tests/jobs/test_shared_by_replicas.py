"""What replicas of one process would share, which plans leave them out for."""

from functools import partial

import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn

import kway

SGD = partial(torch.optim.SGD, lr=0.1)
KEPT = {}


class Kept(nn.Linear):
    """Reads what a hook has kept in a global variable, of which a process has one for all its replicas."""

    def __init__(self):
        super().__init__(6, 3)
        self.register_forward_pre_hook(lambda module, args: KEPT.__setitem__("x", args[0]))

    def forward(self, x):
        return super().forward(KEPT["x"])


def test_plans_leave_threads_out_where_replicas_would_share_what_a_hook_keeps(two_cores, monkeypatch):
    monkeypatch.setattr("kway.jobs.place.rank_threads", lambda device_set: 1)
    job = kway.Job(
        Kept, nn.CrossEntropyLoss(), SGD, (torch.zeros(64, 6), torch.arange(64) % 3), batch_size=64
    )
    timed = workload((16, 32, 64), model="Kept", threads=(1, 2))
    record = kway.plan(job, workload=timed, measurements=measurements(latency_s=1e-4))
    assert {row["strategy"] for row in record.candidates} == {"single", "data=2"}
    assert "variable 'KEPT'" in next(each["why"] for each in record.left if each["strategy"] == "threads=2")
