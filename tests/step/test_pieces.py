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


def cut_at(device, shares=2, level="math", kind="compiled", model=None, **settings):
    return piece_bytes(Settings(**settings), device, kind, model or net(), shares, level)


def test_where_code_is_cut():
    assert cut_at(GPU) == BUCKET_BYTES
    assert cut_at(GPU, bucket_mib=2) == 2 * 2**20
    # One device, and level bits, where several must round as one does, have nothing to hide.
    assert cut_at(GPU, shares=1) is None
    assert cut_at(GPU, level="bits") is None
    assert cut_at(GPU, level="bits", overlap=True) == BUCKET_BYTES
    # The processors that would reduce are those that compute.
    assert cut_at(CPU) is None
    assert cut_at(GPU, overlap=False) is None
    assert cut_at(CPU, shares=1, overlap=True) == BUCKET_BYTES
    assert cut_at(GPU, kind="graph") is None


def test_a_larger_model_has_larger_pieces_and_more_of_them():
    with torch.device("meta"):
        large = nn.Linear(5_000, 5_000, bias=False)
        frozen = nn.Sequential(large, nn.Linear(5_000, 5_000).requires_grad_(False))
    # 95 MiB in pieces of sqrt(95 * 25) MiB.
    assert cut_at(GPU, model=large) / 2**20 == pytest.approx(48.8, abs=0.1)
    assert cut_at(GPU, model=frozen) == cut_at(GPU, model=large)


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
