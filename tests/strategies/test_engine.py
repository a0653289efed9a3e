"""What an engine leaves where it is refused, and in which order it looks at what ranks hold."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def job_of(model, **more):
    sgd = partial(torch.optim.SGD, lr=0.1)
    data = {"data": (X, torch.arange(8) % 2), "validation": (X, torch.arange(8) % 2), "batch_size": 4}
    return kway.Job(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd, **{**data, "precision": "fp64", **more}
    )


def flags():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def hooks(model):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_an_opening_that_is_refused_leaves_nothing_while_its_error_is_held():
    begun = flags()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    with kway.parallel(job_of(model, precision="fp32"), devices="cpu"):
        before = flags(), hooks(model)
        other = job_of(model, precision="tf32")
        with (
            pytest.raises(kway.RefusedError, match="part of another open job") as held,
            kway.parallel(other, devices="cpu", exactness="loose"),
        ):
            pass
        assert (flags(), hooks(model)) == before, held.value
    assert flags() == begun


def drifted(context):
    """Judge where one rank holds another weight and all hold other buffers; return what each holds then."""
    model = nn.Linear(3, 2).double()
    model.register_buffer("own", torch.zeros(2))
    with kway.parallel(job_of(model), strategy="data") as p:
        p.model.own.fill_(p.rank)
        with torch.no_grad():
            p.model.bias[0] = p.rank
        with pytest.raises(kway.ReplicaError, match="'bias' on rank 1"):
            p.evaluate()
        return p.model.own.tolist()


def test_buffers_are_not_brought_together_where_weights_do_not_fit(ranks):
    assert ranks.run(drifted) == [[0, 0], [1, 1]]
