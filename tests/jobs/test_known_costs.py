"""What a plan rests on: step kinds by device, what a short look measures, and what there is nothing of."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn

import kway
from kway.errors import UsageError
from kway.jobs import known_costs


def test_where_no_step_kind_could_be_timed_the_error_says_why(two_cores):
    known = workload((4, 8), model="net", threads=(1, 2))
    known = replace(known, step_kinds_left={"compiled": "there is no compiler"})
    sgd, data = partial(torch.optim.SGD, lr=0.1), (torch.zeros(8, 3), torch.zeros(8).long())
    job = kway.Job(lambda: nn.Linear(3, 2), nn.CrossEntropyLoss(), sgd, data, batch_size=8, name="net")
    with pytest.raises(UsageError, match=r"no plan for net: compiled \(cpu\): there is no compiler"):
        kway.plan(job, step_kind="compiled", devices="cpu:2", workload=known, measurements=measurements())


def test_step_kinds_that_need_a_gpu_are_looked_for_on_gpus_alone():
    assert known_costs.kinds_for(["graph", "eager"], "cpu") == ["eager"]
    assert known_costs.kinds_for(["graph"], "cuda") == ["graph"]
    assert known_costs.kinds_for(None, "cpu") == ["eager"]
    assert "graph" in known_costs.kinds_for(None, "cuda")


def test_a_short_look_measures_what_the_model_needs():
    small, large, unknown = (workload(buckets=buckets) for buckets in ([4_000], [4_000, 4_000], []))
    assert known_costs.needed("cpu", small, short=True) == ("collectives", "beside")
    for each in (large, unknown):
        assert known_costs.needed("cpu", each, short=True) == known_costs.EXPERIMENTS["cpu"]
    assert known_costs.needed("cpu", small, short=False) == known_costs.EXPERIMENTS["cpu"]
    assert known_costs.needed("cuda", small, short=True) == known_costs.EXPERIMENTS["cuda"]
