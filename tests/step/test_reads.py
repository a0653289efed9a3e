"""Why a step reads a value back, where it is kway that asks other devices."""

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tests.step.recorded import Net, opened, share
from torch import nn

import kway.comm.flat
from kway.comm.flat import FlatGradients
from kway.step.observe import waits
from kway.step.reads import why_read


class Partly(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 3)


def with_a_spare_part(context, frozen):
    """Let a read of ``flat.py`` be a wait, as it is on a GPU."""
    model, found = Partly(), []
    model.spare.requires_grad_(not frozen)
    handed_out = FlatGradients.hand_out

    def hand_out(flat, complete=False):
        found.extend([] if complete else ["other.py, line 3", "kway's flat.py, line 9"])
        handed_out(flat, complete)

    @contextmanager
    def waits(places):
        found.clear()
        yield
        places.extend(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kway.step.share.check_calls", lambda calls, own: None)
        patch.setattr("kway.step.graph.waits", waits)
        patch.setattr(FlatGradients, "hand_out", hand_out)
        engine, graphed, recorder = opened(
            model, world=context.world, optimizer=partial(torch.optim.SGD, lr=0.1)
        )
        for step in range(5):
            graphed.run(share(2 * step + context.world.rank, rows=3, total=6), step)
        graphed.forget()
        engine.close()
    return len(recorder.made), graphed.notices


def test_a_part_that_is_not_used_is_named_where_devices_ask_each_other_for_it(ranks):
    for made, notices in ranks.run(with_a_spare_part, False, size=2):
        assert made == 0
        assert "no device has a gradient for 'spare.weight', 'spare.bias', which" in notices[0]
    assert ranks.run(with_a_spare_part, True, size=2) == [(1, []), (1, [])]


def test_a_wait_is_named_with_whose_file_it_is_in():
    places, text = [], "called a synchronizing CUDA operation"
    with waits(places):
        warnings.warn_explicit(text, UserWarning, kway.comm.flat.__file__, 7)
        warnings.warn_explicit(text, UserWarning, "/home/me/flat.py", 8)
    assert places == ["kway's flat.py, line 7", "flat.py, line 8"]
    assert "(flat.py, line 8)" in why_read(places[1:], ["a"])
    assert "all_samples" in why_read(["kway's gather.py, line 3"], ["a"])
    assert "'a', 'b', 'c' and 1 more" in why_read(places, [*"abcd"])
    assert why_read(places, []).startswith("this device has no gradient")
