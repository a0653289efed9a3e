"""Which candidates agree with the step as it is."""

import weakref

import torch

from kway.tuning.agreement import Trace, standard


def trace(loss=1.0, weight=1.0, counter=3):
    tensors = {"weight": torch.tensor([weight, -0.5]), "counter": torch.tensor(counter)}
    return Trace((loss,), tensors)


def test_rounding_agrees_and_more_does_not():
    own = standard(trace(), [trace(), trace()], "fp32")
    assert own.difference(trace(weight=1 + 60 * 2**-23)) == ""
    assert "weight differs by" in own.difference(trace(weight=1 + 80 * 2**-23))
    assert "the loss of step 1" in own.difference(trace(loss=1.001))
    assert "counter differs" in own.difference(trace(counter=4))


def test_what_the_step_differs_by_from_itself_widens_what_is_allowed():
    own = standard(trace(), [trace(weight=1.001)], "fp32")
    assert own.difference(trace(weight=1.015)) == ""
    assert own.difference(trace(weight=1.02)) != ""


def test_a_narrow_precision_allows_its_own_rounding_and_no_sign():
    own = standard(trace(), [trace()], "bf16")
    assert own.difference(trace(weight=1.05, loss=1.02)) == ""
    assert own.difference(trace(loss=1.05)) != ""
    assert own.difference(trace(weight=-1.0)) != ""


def test_nan_agrees_with_nan_alone_and_a_missing_tensor_with_nothing():
    broken = trace(loss=float("nan"), weight=float("nan"))
    assert standard(broken, [broken], "fp32").difference(broken) == ""
    assert standard(trace(), [trace()], "fp32").difference(broken) != ""
    assert "weight is not" in standard(trace(), [trace()], "fp32").difference(
        Trace((1.0,), {"counter": torch.tensor(3)})
    )


def test_infinite_noise_lets_nothing_pass():
    broken = standard(trace(), [trace(weight=float("inf"))], "fp32")
    assert broken.difference(trace()) == ""
    assert broken.difference(trace(weight=float("inf"))) != ""


def test_what_is_kept_may_round_when_it_is_written():
    own = Trace((1.0,), {"weight": torch.tensor([1e-6])}, {"weight": 1.0})
    alike = standard(own, [own], "fp32")
    assert alike.difference(Trace((1.0,), {"weight": torch.tensor([1e-6 + 2**-23])})) == ""
    assert alike.difference(Trace((1.0,), {"weight": torch.tensor([0.0])})) != ""


def test_of_other_orders_one_is_held_at_a_time():
    held = []

    def others():
        for weight in (1.0, 1.01, 1.001):
            other = trace(weight=weight)
            held.append(weakref.ref(other))
            yield other
            del other
            assert held[-1]() is None

    assert abs(standard(trace(), others(), "fp32").noise["weight"] - 0.01) < 1e-6
