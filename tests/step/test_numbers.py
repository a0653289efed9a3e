"""The numbers that travel with gradients: what they say, and that recorded steps say the same in their own way."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.step.recorded import Net, opened, share
from torch._dynamo.testing import CompileCounter

from kway.step.numbers import alone, told, written
from kway.step.outcome import apart

SUMS = [torch.tensor([3.0, 2.0]), torch.tensor([5.0, 6.0])]


def of(total, dtype=torch.float64):
    return torch.tensor([total], dtype=dtype)


def both(third=7.0):
    found = [written(SUMS[place], torch.tensor([7.0, place]).double(), place, 2) for place in range(2)]
    found[1][5] = third
    return torch.stack(found).sum(0, keepdim=True)


def test_each_rank_writes_its_own_places_alone():
    first = alone(SUMS[0], 0, 2)
    assert first.tolist() == [3, 0, 2, 0, 0, 0, 0, 0, 0]
    assert both().tolist() == [[3, 5, 2, 6, 7, 7, 0, 1, 0]]


@pytest.mark.parametrize(("averaged", "loss", "divisor"), [(True, 1.0, 0.8), (False, 8.0, 0.1)])
def test_what_sums_say_in_closed_form(averaged, loss, divisor):
    numbers, by = told(both(), 2, of(10), averaged, True, True, torch.float64)
    assert [value if value is None else value.tolist() for value in apart(numbers, (2, 2, 2))] == [
        loss, 8, [3, 5], [0, 1], [7, 7],
    ]  # fmt: skip
    assert float(by) == pytest.approx(divisor, abs=1e-15)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("wrong", ["other collectives", "a gradient that came too late"])
def test_numbers_that_must_not_count_are_none(wrong, averaged):
    parts = both(8.0 if wrong == "other collectives" else 7.0)
    if wrong != "other collectives":
        parts[0, -1] = math.nan
    numbers, by = told(parts, 2, of(10), averaged, True, True, torch.float64)
    assert torch.isnan(numbers[:2]).all()
    assert torch.isnan(by)


@pytest.mark.parametrize(("averaged", "loss", "divisor"), [(True, math.nan, 1.0), (False, 0.0, 0.1)])
def test_a_batch_of_no_weight_has_no_mean_and_leaves_gradients_as_they_are(averaged, loss, divisor):
    parts = both()
    parts[0, :4] = 0
    numbers, by = told(parts, 2, of(10), averaged, True, True, torch.float64)
    assert numbers[:2].tolist() == pytest.approx([loss, 0], nan_ok=True)
    assert float(by) == pytest.approx(divisor, abs=1e-15)


def test_fingerprints_that_are_not_compared_here_are_handed_on():
    numbers, by = told(both(8.0), 2, of(10), True, True, False, torch.float64)
    assert numbers.tolist() == [1, 8, 3, 5, 0, 1, 7, 8]
    assert float(by) == 0.8


def test_a_step_that_tells_no_fingerprints_has_none():
    numbers, _ = told(both(8.0), 2, of(10), True, False, False, torch.float64)
    assert numbers.tolist() == [1, 8, 3, 5, 0, 1]
    assert apart(numbers, (2, 2, 0))[-1] is None


def test_parts_are_added_up_in_double_precision():
    parts = torch.zeros(3, 5)
    parts[:, 0] = torch.tensor([2.0**24, 1, 1])
    parts[0, 1] = 1
    numbers, by = told(parts, 1, of(1, torch.float32), True, True, True, torch.float32)
    assert numbers.dtype == by.dtype == torch.float32
    assert numbers[:3].tolist() == [2**24 + 2, 1, 2**24 + 2]


def test_batches_of_all_sizes_share_one_code():
    counter = CompileCounter()
    engine, _, _ = opened(torch.nn.Linear(3, 2), optimizer=partial(torch.optim.SGD, lr=0.1))
    engine._step.told = torch.compile(told, dynamic=False, backend=counter)
    for number, rows in enumerate((6, 5, 4, 3)):
        whole = share(number, rows)
        (x, y), _ = whole.micro[0]
        pieces = [((x[:2], y[:2]), 2), ((x[2:], y[2:]), rows - 2)]
        before = engine.model.weight.detach().clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(x @ before.T + engine.model.bias.detach(), y)
        (slope,) = torch.autograd.grad(expected, before)
        outcome = engine._step.run(replace(whole, micro=pieces), number)
        torch.testing.assert_close(outcome.loss, expected.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(engine.model.weight.grad, slope, rtol=1e-5, atol=1e-7)
    assert counter.frame_count == 1
    engine.close()


def recorded(context, compiles):
    # A CPU would look at once, while a step is recorded, at what is told to the recording only afterwards.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kway.step.share.check_calls", lambda calls, own: None)
        return taken(context, compiles)


def taken(context, compiles):
    engine, step, recorder = opened(Net(), world=context.world, optimizer=partial(torch.optim.SGD, lr=0.1))
    step._traced = not compiles
    engine._step.compiles = compiles
    outcomes, written = [], []
    real = engine._step.written
    # Compiled code must have been made before a device records.
    engine._step.written = lambda *given: (written.append(len(recorder.made)), real(*given))[1]
    for number in range(6):
        engine._step.asked = 1 if number == 4 and context.world.rank else 0
        part = share(2 * number + context.world.rank, rows=3 - context.world.rank, total=5)
        outcomes.append(step.run(part, number).packed().tolist())
    replays, said = sum(made.replays for made in recorder.made), list(step.notices)
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    step.forget()
    engine.close()
    assert (0 in written) == compiles
    return outcomes, weights, replays, said


def test_a_recorded_step_tells_the_same_from_cells_on_the_device_and_by_filling_in(ranks):
    plain, fused = (ranks.run(recorded, compiles, size=2) for compiles in (False, True))
    for (outcomes, weights, replays, said), (others, their, again, too) in zip(plain, fused, strict=True):
        assert replays
        assert again
        assert not said + too
        assert outcomes == others
        assert outcomes[4][4:6] == [0.0, 1.0]
        assert all(torch.equal(value, their[name]) for name, value in weights.items())
