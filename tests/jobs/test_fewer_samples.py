"""Plans of data that have fewer samples than a batch."""

from functools import partial

import pytest
import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn

import kway

X, Y = torch.randn(20, 36, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


def job():
    sgd = partial(torch.optim.SGD, lr=0.05)
    return kway.Job(partial(nn.Linear, 36, 3), nn.CrossEntropyLoss(), sgd, (X, Y), batch_size=64, name="net")


@pytest.mark.parametrize(("weak", "batches"), [(False, {20}), (True, {16, 20})])
def test_no_step_of_a_plan_has_more_samples_than_there_are(two_cores, ranks, weak, batches):
    timed = workload((5, 10, 20), model="net", threads=(1, 2), batch_size=20)
    known = {"workload": timed, "measurements": measurements(), "strategy": "single,data"}
    record = kway.plan(job(), batch_size_per_device=16 if weak else None, **known)
    assert {row["batch_size"] for row in record.candidates} == batches
    most = 32 if weak else 64
    assert f"the data has 20 samples, fewer than a batch of {most}: no step has more" in record.notices
    if not weak:
        assert record.best["step_s"] < 3e-3
        run = kway.train(job(), plan=record, epochs=1, ranks=ranks)
        assert run.record.predicted_step_s == record.best["step_s"]
