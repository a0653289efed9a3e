"""Which peaks of memory a profile tells of: of one device alone, and of one of several."""

from functools import partial
from typing import ClassVar

import torch
from tests.profiling.test_profile import Greedy, job, profiled
from torch import nn

from kway.comm import apart, reduce
from kway.profiling.run import Profiler


def test_peaks_are_asked_of_the_shares_that_fit_alone(monkeypatch):
    """As on a GPU that is too small for the whole batch."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1 << 20)
    monkeypatch.setattr(
        Profiler,
        "_peaks",
        lambda self, sittings, before: {
            (sitting.seat.devices, n): sitting.peak(n) for sitting in sittings for n in sitting.shares
        },
    )
    record = profiled(job(partial(Greedy, 8, 4)))
    found = {(each["devices"], each["samples"]): each["bytes"] for each in record.memory["peak"]}
    assert found == dict.fromkeys([(1, 8), (1, 4), (2, 8), (2, 4)], 1 << 20)


class Watched(nn.Linear):
    """Notes whether there are gradients when a forward pass begins."""

    found: ClassVar[list[bool]] = []

    def forward(self, x):
        if torch.is_grad_enabled():
            self.found.append(self.weight.grad is not None)
        return super().forward(x)


class Looks(torch.optim.SGD):
    """Notes whether the gradients that it gets lie in one vector."""

    found: ClassVar[list[bool]] = []

    def step(self, closure=None):
        weight, bias = self.param_groups[0]["params"]
        self.found.append(weight.grad.untyped_storage().data_ptr() == bias.grad.untyped_storage().data_ptr())
        return super().step(closure)


def test_what_the_peak_of_one_of_several_rests_on():
    """No gradient is there while activations are made, and those of several lie in vectors: ``gradients_at_peak``."""
    record = profiled(job(partial(Watched, 8, 4), optimizer=partial(Looks, lr=0.1)))
    assert Watched.found
    assert not any(Watched.found)
    # Of one device alone they are backward's own.
    assert set(Looks.found) == {True, False}
    peak = {(each["devices"], each["samples"]): each["bytes"] for each in record.memory["peak"]}
    assert set(peak) == {(1, 16), (1, 8), (1, 4), (2, 8), (2, 4)}
    assert peak[2, 8] - peak[1, 8] == sum(record.buckets) == record.memory["vector_bytes"]
    assert record.memory["first_copies_bytes"] == 0


def test_large_gradients_that_lie_in_no_vector_are_in_no_peak(monkeypatch):
    """As on GPUs: of a weight that is sent where backward left it, only numbers and the bias lie in a vector."""
    monkeypatch.setattr(apart, "APART_BYTES", 100)
    made = reduce.FlatGradients
    monkeypatch.setattr(
        reduce, "FlatGradients", lambda *args, **more: made(*args, **{**more, "large_apart": True})
    )
    record = profiled(job(partial(nn.Linear, 8, 4)))
    (bucket,) = record.buckets
    assert record.memory["vector_bytes"] == bucket - 4 * 8 * 4
    peak = {(each["devices"], each["samples"]): each["bytes"] for each in record.memory["peak"]}
    assert peak[2, 8] - peak[1, 8] == record.memory["vector_bytes"]
