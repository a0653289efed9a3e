"""Compiled code in pieces: the same numbers, and gradients that come before backward has ended."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.comm.buckets import BUCKET_BYTES
from kway.devices.compilers import missing
from kway.step.pieces import piece_bytes
from kway.step.settings import Settings

CPU, GPU = torch.device("cpu"), torch.device("cuda")
G = torch.Generator().manual_seed(0)
DATA = torch.randn(16, 3, generator=G), torch.arange(16) % 2


def net():
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))


def test_where_code_is_cut():
    assert piece_bytes(Settings(), GPU, hides=True) == BUCKET_BYTES
    assert piece_bytes(Settings(bucket_mib=2), GPU, hides=True) == 2 * 2**20
    assert piece_bytes(Settings(), GPU, hides=False) is None
    # The processors that would reduce are those that compute.
    assert piece_bytes(Settings(), CPU, hides=True) is None
    assert piece_bytes(Settings(overlap=False), GPU, hides=True) is None
    assert piece_bytes(Settings(overlap=True), CPU, hides=False) == BUCKET_BYTES


@pytest.mark.skipif(missing("cpu") is not None, reason=f"torch.compile: {missing('cpu')}")
def test_pieces_compute_what_the_whole_does(monkeypatch):
    from torch._dynamo.backends import distributed

    cut = []
    compiled = distributed.DDPOptimizer.compile_fn

    def watched(self, *args, **more):
        made = compiled(self, *args, **more)
        cut.append(len(self.buckets))
        return made

    monkeypatch.setattr(distributed.DDPOptimizer, "compile_fn", watched)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = kway.Job(net, nn.CrossEntropyLoss(), sgd, DATA, batch_size=8, precision="fp64")
    settings = {"overlap": True, "bucket_mib": 0.0001}
    eager = kway.train(job, devices="cpu:1", epochs=2)
    run = kway.train(job, devices="cpu:1", epochs=2, step_kind="compiled", settings=settings)
    assert run.record.step_kind == "compiled"
    # Two layers, each of more than the hundred bytes of a bucket.
    assert cut == [2]
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=1e-12)
