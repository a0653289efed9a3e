"""A checkpoint on several GPUs: every rank loads onto its own."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def k07(context, folder):
    """Train one step on this rank's GPU from a checkpoint; bytes that this process holds on each GPU."""
    import kway

    draw = torch.Generator().manual_seed(0)
    job = kway.Job(
        model=lambda: torch.nn.Linear(512, 512),
        loss=torch.nn.MSELoss(),
        optimizer=lambda named: torch.optim.Adam(named, lr=0.1),
        data=(torch.rand(64, 512, generator=draw), torch.rand(64, 512, generator=draw)),
        batch_size=16,
    )
    with kway.parallel(job, devices="auto", strategy="data") as p:
        begun = p.resume(folder)
        for batch in p.batches(0, begun.step):
            p.step(batch)
            p.checkpoint(folder, 0, batch.step + 1)
            break
        held = [torch.cuda.memory_allocated(place) for place in range(torch.cuda.device_count())]
    return context.world.rank, begun.step, held


def test_k07_every_rank_loads_onto_its_own_gpu(pair, two, tmp_path):
    pair.run(k07, str(tmp_path / "saved"))
    for rank, begun, held in pair.run(k07, str(tmp_path / "saved")):
        assert begun == 1
        assert held[rank] > 0
        assert all(size == 0 for place, size in enumerate(held) if place != rank)
