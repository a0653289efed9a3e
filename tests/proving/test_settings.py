"""Settings that tuning may choose on a CPU are proved as the step as it is."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.tuning.knobs import SETTINGS as ALL
from kway.tuning.knobs import Subject, stages

G = torch.Generator().manual_seed(0)
DATA = torch.randn(30, 1, 6, 6, generator=G), torch.arange(30) % 3
SETTINGS = [
    {"memory_format": "channels_last", "optimizer": "fused", "bucket_mib": 0.0005},
    {"memory_format": "contiguous", "optimizer": "foreach"},
]


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("exactness", ["math", "bits"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["one", "other"])
def test_settings_are_proved(ranks, settings, exactness):
    sgd = partial(torch.optim.SGD, lr=0.1)
    job = kway.Job(net, nn.CrossEntropyLoss(), sgd, DATA, batch_size=10)
    proof = kway.prove(
        job,
        devices="1,2",
        exactness=exactness,
        shards=2,
        settings=settings,
        own_optimizer=True,
        ranks=ranks.of(2),
    )
    assert proof.verdict == "pass", str(proof)
    if exactness == "bits":
        assert proof.certificate["holds_within"]["settings"] == settings


# Level bits fixes these itself.
OF_SHARES = {"threads": 1, "micro_batch": 3}


def test_a_share_that_is_cut_by_settings_is_proved(ranks):
    sgd = partial(torch.optim.SGD, lr=0.1)
    model = partial(nn.Sequential, nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))
    job = kway.Job(model, nn.CrossEntropyLoss(), sgd, DATA, batch_size=10)
    proof = kway.prove(job, devices="1,2", settings=OF_SHARES, own_optimizer=True, ranks=ranks.of(2))
    assert proof.verdict == "pass", str(proof)


def test_all_that_tuning_may_set_on_a_cpu_is_proved():
    subject = Subject(
        "cpu", 2, threads=4, images=True, forms=("foreach", "fused"), gradient_bytes=10**9, micro_batch=64,
        may_be_cut=True,
    )  # fmt: skip
    tried = {name for stage in stages(subject) for change in stage.changes for name in change}
    assert tried & ALL == {name for settings in (*SETTINGS, OF_SHARES) for name in settings}
