"""Settings that tuning may choose on a CPU are proved as the step as it is."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

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
