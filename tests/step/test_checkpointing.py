"""Buffers and recomputation, and what torch does that they lean on."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kway.step.checkpointing import buffers_kept, recomputing


class Asking(nn.Module):
    """Notes whether it is computed again, and counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.again = []

    def forward(self, x):
        self.again.append(recomputing())
        self.passes += 1
        return x.sin()


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_tells_a_recomputation_from_a_forward_pass(reentrant):
    asking, x = Asking(), torch.ones(2, requires_grad=True)
    y = checkpoint(asking, x, use_reentrant=reentrant).sum()
    assert asking.again == [False]
    y.backward()
    assert asking.again == [False, True]
    assert float(asking.passes) == 2  # what torch does by itself
    assert not recomputing()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("early_stop", [False, True])
def test_buffers_are_kept_by_identity_and_value(reentrant, early_stop):
    model = nn.Sequential(Asking(), nn.BatchNorm1d(2), nn.Tanh())
    before = dict(model.named_buffers())
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with buffers_kept(model), torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert model[0].again == [False, True] * 2
    assert float(model[0].passes) == int(model[1].num_batches_tracked) == 2
    assert all(before[name] is buffer for name, buffer in model.named_buffers())


def test_a_part_that_fails_when_computed_again_leaves_its_buffers():
    class Failing(Asking):
        def forward(self, x):
            if recomputing():
                self.passes += 1
                raise ValueError("again")
            return super().forward(x)

    model, x = Failing(), torch.ones(2, requires_grad=True)
    with buffers_kept(model):
        y = checkpoint(model, x, use_reentrant=False).sum()
        with pytest.raises(ValueError, match="again"):
            y.backward()
        assert float(model.passes) == 1
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_nothing_of_it_is_left_at_the_end():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with buffers_kept(model):
        assert len(model[1]._forward_hooks) == len(model[1]._forward_pre_hooks) == 1
        assert not model[0]._forward_hooks
    assert not model[1]._forward_hooks
    assert not model[1]._forward_pre_hooks
