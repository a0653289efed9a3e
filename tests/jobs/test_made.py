"""What a model makes when it first runs: it comes back from several devices, and a run goes on with it."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

_DRAW = torch.Generator().manual_seed(0)
X, Y = torch.rand(20, 2, generator=_DRAW), torch.rand(20, 2, generator=_DRAW)


class Counts(nn.Module):
    """Makes a counter in the place of nothing, a scale in that of None, and one in no weights file."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale, self.table = nn.Linear(2, 2), None, None

    def forward(self, x):
        if not hasattr(self, "passes"):
            self.register_buffer("passes", torch.zeros(()))
            del self.scale, self.table
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("table", torch.ones(2), persistent=False)
        if self.training:
            self.passes += 1
            self.table *= 0.9
        return self.layer(x) * self.scale * self.table * (1 + 0.1 * torch.sin(self.passes))


class Fixed(nn.Module):
    """Makes a parameter that is not trained."""

    def __init__(self, before=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        if before:
            self.factor = before

    def forward(self, x):
        if not isinstance(getattr(self, "factor", None), torch.Tensor):
            vars(self).pop("factor", None)
            self.factor = nn.Parameter(torch.full((2,), 0.5), requires_grad=False)
        return self.layer(x) * self.factor


def trained(ranks, model, size, epochs=4, **more):
    job = kway.Job(
        model=model, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), data=(X, Y),
        batch_size=10, ema=0.9,
    )  # fmt: skip
    strategy = "data" if size > 1 else "single"
    return kway.train(
        job, devices=f"cpu:{size}", strategy=strategy, epochs=epochs, ranks=ranks, echo=False, **more
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("then", [1, 2])
def test_a_run_goes_on_with_the_buffers_that_the_model_made(ranks, tmp_path, size, then):
    given = {"exactness": "bits", "shards": 4}
    whole = trained(ranks, Counts, 1, **given)
    trained(ranks, Counts, size, epochs=2, out=tmp_path / "run", checkpoint_every=1, **given)
    again = trained(ranks, Counts, then, out=tmp_path / "more", resume=tmp_path / "run", **given)
    assert again.record.resumed_from_step == 4
    assert again.record.weights_sha256 == whole.record.weights_sha256
    assert float(again.model.passes) == 8


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_the_model_made_is_one_afterwards(ranks, tmp_path, size):
    run = trained(ranks, Fixed, size, epochs=2, out=tmp_path / "run", checkpoint_every=1)
    again = trained(ranks, Fixed, size, out=tmp_path / "more", resume=tmp_path / "run")
    for model in (run.model, again.model):
        assert not dict(model.named_parameters())["factor"].requires_grad
        assert not dict(model.named_buffers())


def test_what_takes_the_place_of_something_is_refused_by_name(ranks):
    with pytest.raises(kway.UsageError, match=r"'factor' of a Fixed was made while .* has a str there: "):
        trained(ranks, partial(Fixed, "later"), 2, epochs=1)
