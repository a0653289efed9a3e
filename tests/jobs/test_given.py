"""Workloads that a user gives, held against what is asked for now."""

from functools import partial

import pytest
import torch
from tests.workloads import workload
from torch import nn

import kway
from kway.devices.simulated import simulated
from kway.errors import UsageError
from kway.jobs.asked import asked_of
from kway.jobs.given import workloads_given
from kway.profiling.optimizer_text import optimizer_text
from kway.strategies.layout import AUTO

X, Y = torch.randn(640, 8), torch.arange(640) % 3
SGD = partial(torch.optim.SGD, lr=0.1)


def net():
    return nn.Linear(8, 3)


def given(*records, devices=AUTO, cluster=None, weak=None, **more):
    job = kway.Job(net, nn.CrossEntropyLoss(), **{"optimizer": SGD, "data": (X, Y), "batch_size": 64, **more})
    asked = asked_of(job, devices, AUTO, "math", 8, AUTO, weak, cluster or simulated(cores=2))
    return workloads_given(list(records), asked)


def of(**changes):
    return workload((16, 32, 64), **{"model": "net", **changes})


def test_a_workload_of_what_is_asked_for_is_taken():
    assert list(given(of())) == ["cpu"]
    # Another learning rate is no other optimizer, and a batch larger than the data is all of them.
    assert given(of(), optimizer=partial(torch.optim.SGD, lr=3.0))
    assert given(workload((160, 320, 640), model="net"), batch_size=1_000)
    both = given(of(), of(device="cuda:0", device_name="simulated GPU"), cluster=simulated(gpus=1, cores=2))
    assert list(both) == ["cpu", "cuda"]


@pytest.mark.parametrize(
    ("changed", "asked", "said"),
    [
        ({"model": "other"}, {}, r"a workload of model other: the job has net; profile it"),
        ({"precision": "bf16"}, {}, r"a workload of precision bf16: the job has fp32;"),
        ({"level": "loose"}, {}, r"a workload of level loose: the job has math;"),
        ({}, {"batch_size": 32}, r"a workload of batch 64: the job has 32;"),
        ({}, {"optimizer": torch.optim.Adam}, r"a workload of optimizer SGD: the job has Adam;"),
        (
            {"optimizer": "SGD with momentum"},
            {},
            r"a workload of optimizer SGD with momentum: the job has SGD;",
        ),
        ({"device": "cuda:0", "device_name": "H100"}, {}, r"a workload of device cuda:0: the job has cpu;"),
        ({"device_name": "some CPU"}, {}, r"a workload of device some CPU: the job has simulated CPU;"),
        (
            {"precision": "tf32"},
            {"batch_size": 32, "optimizer": torch.optim.Adam},
            r"a workload of precision tf32, batch 64, optimizer SGD: the job has fp32, 32, Adam;",
        ),
    ],
)
def test_what_differs_is_one_error_with_all_of_it(changed, asked, said):
    with pytest.raises(UsageError, match=said):
        given(of(**changed), **asked)


def test_with_a_batch_for_each_device_a_workload_is_of_that_of_some_devices():
    assert given(of(), weak=32)
    assert given(of(), weak=64)
    with pytest.raises(UsageError, match=r"a workload of batch 64: the job has 48 or 96;"):
        given(of(), weak=48)


def test_two_workloads_of_one_type_of_device_are_refused():
    with pytest.raises(UsageError, match="two workloads of CPU ranks"):
        given(of(), of())


def test_the_users_module_stays_as_it_is_when_its_optimizer_is_looked_at():
    model = net()

    def freezes(named):
        parameters = [parameter.requires_grad_(False) for _, parameter in named]
        return torch.optim.SGD(parameters, lr=0.1)

    job = kway.Job(model, nn.CrossEntropyLoss(), freezes, (X, Y), batch_size=64, name="net")
    asked = asked_of(job, AUTO, AUTO, "math", 8, AUTO, None, simulated(cores=2))
    assert workloads_given(of(), asked)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), "SGD with momentum, nesterov"),
        (partial(torch.optim.Adam, lr=0.1, fused=True), "Adam"),
        (partial(torch.optim.AdamW, lr=0.1, amsgrad=True), "AdamW with amsgrad"),
        (
            lambda held: torch.optim.SGD([{"params": held, "weight_decay": 0.1}], lr=1.0),
            "SGD with weight_decay",
        ),
    ],
)
def test_an_optimizer_in_words(made, text):
    assert optimizer_text(made([*net().parameters()])).startswith(text)
