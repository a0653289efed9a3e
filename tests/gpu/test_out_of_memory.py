"""A GPU that really runs out of memory, of which a process may take 1 GiB."""

import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.profiling.workspaces import without_workspaces

pytestmark = pytest.mark.gpu

LIMIT = 1 << 30
SAMPLES, WIDE = 1 << 16, 4096


def limit(device):
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(LIMIT / total, device)


class Wide(nn.Module):
    """Two activations of 16 KiB a sample: 1 GiB each of all samples. ``limits``: its own process, as it computes."""

    def __init__(self, limits=False):
        super().__init__()
        self.first, self.last, self.limits = nn.Linear(8, WIDE), nn.Linear(WIDE, 2), limits

    def forward(self, x):
        if self.limits:
            limit(x.device)
        return self.last(self.first(x).relu())


def job(**more):
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, 8, generator=draw), torch.randint(2, (SAMPLES,), generator=draw)
    given = {"model": Wide, "loss": nn.CrossEntropyLoss(), "optimizer": partial(torch.optim.SGD, lr=0.1)}
    return kway.Job(**{**given, "data": data, "batch_size": SAMPLES, **more})


@contextmanager
def limited(device):
    """Limit this process, without what earlier tests left in it."""
    gc.collect()
    without_workspaces()
    torch.cuda.empty_cache()
    limit(device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        gc.collect()
        torch.cuda.empty_cache()


def test_a_full_gpu_is_told_by_part(one):
    with limited(one), pytest.raises(kway.OutOfMemoryError) as caught:
        kway.train(job(), devices=one, epochs=1, step_kind="eager")
    error = caught.value
    assert (error.device, error.samples) == (one, SAMPLES)
    assert error.phase in ("forward", "backward")
    assert error.memory["weights"] == 4 * (8 * WIDE + WIDE + 2 * WIDE + 2)
    # Images and labels stay on the device.
    assert error.memory["input"] >= SAMPLES * (8 * 4 + 8)
    assert error.memory["asked"] >= SAMPLES * WIDE * 4
    assert 0 <= error.memory["activations and workspace"] <= LIMIT
    assert error.fits is not None
    assert 0 < error.fits <= SAMPLES // 2
    assert "of which this process may take 1.0 GiB" in str(error)
    assert f"micro_batch={error.fits} " in str(error)


def test_what_failed_gives_its_memory_back(one):
    with limited(one):
        with pytest.raises(kway.OutOfMemoryError) as caught:
            kway.train(job(), devices=one, epochs=1, step_kind="eager")
        # The error itself is still there: a notebook keeps the last one.
        gc.collect()
        assert torch.cuda.memory_allocated(one) < LIMIT // 4
        run = kway.train(job(micro_batch=SAMPLES // 16), devices=one, epochs=1, step_kind="eager")
    assert caught.value.samples == SAMPLES
    assert run.record.steps == 1


def test_a_run_is_adapted_to_a_gpu(one):
    run = kway.train(
        job(model=partial(Wide, limits=True)), devices=one, epochs=2, on_oom="adapt", step_kind="eager"
    )
    found = run.record.job["micro_batch"]
    assert SAMPLES // 64 <= found <= SAMPLES // 2
    own = kway.train(job(micro_batch=found), devices=one, epochs=2, step_kind="eager")
    for name, value in own.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6)
