"""Between the first and the last steps of a whole run no operation makes the host wait for its GPU.

By torch's debug mode, which sees operations that copy or read back. It sees nothing of torch.distributed, nor
``synchronize()`` of devices, streams and events.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import kway
from kway.zoo import get

pytestmark = pytest.mark.gpu

BATCH, STEPS = 64, 160
# The first steps work memory out, and are recorded.
BEGIN, END = 40, 150


class Guard:
    """A schedule's factor, 1, that makes each wait of this rank's host an error in some steps."""

    def __call__(self, step):
        if step in (BEGIN, END):
            torch.cuda.set_sync_debug_mode("error" if step == BEGIN else "default")
        return 1.0


def job(loss):
    draw = torch.Generator().manual_seed(0)
    samples = BATCH * STEPS
    data = torch.randn(samples, 1, 28, 28, generator=draw), torch.randint(10, (samples,), generator=draw)
    return kway.Job(
        partial(get("lenet"), (1, 28, 28), 10), loss, partial(torch.optim.SGD, lr=0.01), data, batch_size=BATCH,
        schedule=partial(LambdaLR, lr_lambda=Guard()), metrics={"accuracy": kway.accuracy},
    )  # fmt: skip


def reading(output, target):
    loss = nn.functional.cross_entropy(output, target)
    return loss + 0.0 * loss.item()


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["eager", "graph"])
@pytest.mark.parametrize("devices", ["one", "two"])
def test_nothing_waits_in_the_steady_state(request, devices, kind):
    where = request.getfixturevalue(devices)
    run = kway.train(
        job(nn.CrossEntropyLoss()), devices=where, epochs=1, step_kind=kind, tune=False, echo=False
    )
    assert (run.record.step_kind, run.record.steps) == (kind, STEPS), run.record.notices


def test_a_wait_is_found(one):
    with pytest.raises(Exception, match="synchronizing"):
        kway.train(job(reading), devices=one, epochs=1, step_kind="eager", tune=False, echo=False)
