"""How long the runs of a check are, and what is heard of them."""

from functools import partial

import pytest
import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn

import kway
from kway.jobs import checking
from kway.jobs.checking import LEAST_WINDOWS, MOST_WINDOWS, RUN_S, steps_of
from kway.training.clock import LASTS, WARM_UP, WINDOW


@pytest.mark.parametrize("step_s", [1e-5, 1e-4, 5e-3, 0.1, 3.0])
def test_a_run_has_whole_windows_of_the_clock(step_s):
    on_cpu, on_gpu = (steps_of(step_s, gpu) - WARM_UP for gpu in (False, True))
    assert on_cpu % WINDOW == 0
    assert LEAST_WINDOWS <= on_cpu / WINDOW <= MOST_WINDOWS
    # On a GPU a window lasts a while, however fast steps are: the first of them holds what is recorded.
    assert on_gpu * step_s >= 0.99 * max(LEAST_WINDOWS * max(LASTS, WINDOW * step_s), RUN_S)


def scalar(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none").mean()


@pytest.mark.parametrize("strategy", ["single,data,threads", "threads"])
def test_what_the_runs_warn_of_is_said_once(ranks, two_cores, monkeypatch, capsys, strategy):
    monkeypatch.setattr(checking, "RUN_S", 0.0)
    monkeypatch.setattr(checking, "LEAST_WINDOWS", 1)
    monkeypatch.setattr("kway.jobs.place.rank_threads", lambda device_set: 1)
    data, sgd = (torch.randn(64, 3), torch.arange(64) % 4), partial(torch.optim.SGD, lr=0.1)
    job = kway.Job(partial(nn.Linear, 3, 4), scalar, sgd, data, batch_size=64, name="net")
    known = workload((16, 32, 64), model="net", threads=(1, 2))
    record = kway.plan(
        job, strategy=strategy, check=True, ranks=ranks, workload=known, measurements=measurements()
    )
    assert record.check["candidates"] == len(record.candidates) >= 2
    assert capsys.readouterr().err.count("the loss returned a scalar") == 1
