"""Sums and weights of shares add up to torch's loss of the whole batch: value and gradient, for any cut."""

import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kway.errors import RefusedError, UsageError
from kway.step.losses import rule_for

CPU = torch.device("cpu")
N = 9
CUTS = [(0, 9), (0, 5, 9), (0, 0, 1, 9, 9), (0, 3, 3, 4, 8, 9)]
G = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64)


REAL, OTHER = draw(N, 4), draw(N, 4)
PROBABLE, SIGNS = torch.sigmoid(OTHER), torch.sign(OTHER)
CLASSES = torch.tensor([0, 3, 2, 1, 0, 2, 2, 3, 1])
SETS = torch.tensor([[3, 0, -1, 1], [0, -1, 2, 1], [2, 1, 0, -1]] * 3)
IMAGES, PIXELS = draw(N, 4, 2, 3), torch.randint(0, 4, (N, 2, 3), generator=G)
# What a model of text gives, and channels_last.
CLASSES_LAST = IMAGES.contiguous(memory_format=torch.channels_last)
WEIGHT = torch.tensor([1.0, 0.0, 2.5, 0.3], dtype=torch.float64)
REDUCTIONS = ("none", "mean", "sum")

ELEMENTWISE = [
    (nn.MSELoss, F.mse_loss, {}, REAL, OTHER),
    (nn.L1Loss, F.l1_loss, {}, REAL, OTHER),
    (nn.SmoothL1Loss, F.smooth_l1_loss, {"beta": 0.5}, REAL, OTHER),
    (nn.HuberLoss, F.huber_loss, {"delta": 0.7}, REAL, OTHER),
    (nn.BCELoss, F.binary_cross_entropy, {}, torch.sigmoid(REAL), PROBABLE),
    (nn.BCELoss, F.binary_cross_entropy, {"weight": WEIGHT}, torch.sigmoid(REAL), PROBABLE),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, {"pos_weight": WEIGHT}, REAL, PROBABLE),
    (nn.KLDivLoss, F.kl_div, {}, F.log_softmax(REAL, 1), PROBABLE),
    (nn.KLDivLoss, F.kl_div, {"log_target": True}, F.log_softmax(REAL, 1), F.log_softmax(OTHER, 1)),
    (nn.PoissonNLLLoss, F.poisson_nll_loss, {"full": True}, REAL, PROBABLE),
    (nn.SoftMarginLoss, F.soft_margin_loss, {}, REAL, SIGNS),
    (nn.MultiLabelMarginLoss, F.multilabel_margin_loss, {}, REAL, SETS),
    (nn.MultiMarginLoss, F.multi_margin_loss, {"p": 2}, REAL, CLASSES),
    (nn.MultiMarginLoss, F.multi_margin_loss, {"weight": WEIGHT}, REAL, CLASSES),
    (nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss, {}, REAL, PROBABLE.round()),
    (nn.HingeEmbeddingLoss, F.hinge_embedding_loss, {"margin": 0.4}, REAL, SIGNS),
]
BY_CLASS = [
    (kind, function, {"weight": weight, "ignore_index": ignore, **smoothing}, output, target)
    for kind, function, smoothings in (
        (nn.CrossEntropyLoss, F.cross_entropy, ({}, {"label_smoothing": 0.2})),
        (nn.NLLLoss, F.nll_loss, ({},)),
    )
    for smoothing in smoothings
    for weight in (None, WEIGHT)
    for ignore in (-100, 2)
    for output, target in ((REAL, CLASSES), (IMAGES, PIXELS), (CLASSES_LAST, PIXELS))
]
PROBABILITIES = [
    (nn.CrossEntropyLoss, F.cross_entropy, {"weight": weight, "label_smoothing": smoothing}, REAL, PROBABLE)
    for weight in (None, WEIGHT)
    for smoothing in (0.0, 0.1)
]
ALL = [*ELEMENTWISE, *BY_CLASS, *PROBABILITIES]


def whole(loss, output, target):
    """The loss of one device, and its gradient."""
    output = output.clone().requires_grad_()
    value = loss(output.contiguous(), target)  # torch's NLLLoss has no backward where classes lie last
    value = value.mean() if value.dim() else value
    (gradient,) = torch.autograd.grad(value, output)
    return value.detach(), gradient


def in_parts(rule, output, target, cuts):
    output = output.clone().requires_grad_()
    pairs = [rule(output[a:b], target[a:b], b - a) for a, b in pairwise(cuts)]
    total, weight = sum(total for total, _ in pairs), sum(weight for _, weight in pairs)
    value = total / weight if rule.averaged else total
    (gradient,) = torch.autograd.grad(value, output)
    return value.detach(), gradient


def ways(kind, function, options):
    """Module, function, partial, partial of a partial, a subclass that changes nothing, and a module in other words."""
    nested = partial(partial(function, **dict(list(options.items())[:1])), **dict(list(options.items())[1:]))
    module = kind(**options)
    return [
        module, partial(function, **options), nested, type("Own", (kind,), {})(**options),
        partial(module), module.forward,
    ]  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case[0].__name__)
def test_parts_of_a_built_in_loss_add_up_to_the_whole(case, reduction):
    kind, function, options, output, target = case
    options = {**options, "reduction": reduction}
    value, gradient = whole(kind(**options), output, target)
    if kind in (nn.CrossEntropyLoss, nn.NLLLoss) and reduction == "none":
        assert value == kind(**options)(output, target).mean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in ways(kind, function, options):
            rule = rule_for(way, CPU, torch.float64)
            for cuts in CUTS:
                own, own_gradient = in_parts(rule, output, target, cuts)
                torch.testing.assert_close(own, value, rtol=1e-13, atol=1e-14)
                torch.testing.assert_close(own_gradient, gradient, rtol=1e-13, atol=1e-14)


def test_batchmean_divides_by_samples():
    loss = nn.KLDivLoss(reduction="batchmean")
    value, gradient = whole(loss, F.log_softmax(REAL, 1), PROBABLE)
    for cuts in CUTS:
        own, own_gradient = in_parts(rule_for(loss, CPU), F.log_softmax(REAL, 1), PROBABLE, cuts)
        torch.testing.assert_close(own, value, rtol=1e-13, atol=0)
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("divisor", ["elements", "samples"])
def test_a_mean_of_kl_div_is_what_the_installed_torch_divides_by(monkeypatch, divisor, log_target):
    """torch announces that its mean will divide by samples."""
    own = F.kl_div

    def to_come(*args, **kwargs):
        kwargs["reduction"] = "batchmean" if kwargs["reduction"] == "mean" else kwargs["reduction"]
        return own(*args, **kwargs)

    if divisor == "samples":
        monkeypatch.setattr(F, "kl_div", to_come)
    loss = nn.KLDivLoss(reduction="mean", log_target=log_target)
    target = F.log_softmax(OTHER, 1) if log_target else PROBABLE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value, gradient = whole(loss, F.log_softmax(REAL, 1), target)
    for cuts in CUTS:
        found, own_gradient = in_parts(rule_for(loss, CPU), F.log_softmax(REAL, 1), target, cuts)
        torch.testing.assert_close(found, value, rtol=1e-13, atol=0)
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-13, atol=1e-15)


BY_SAMPLE = torch.linspace(0.1, 1, N, dtype=torch.float64)


@pytest.mark.parametrize("cuts", [(0, 9), (0, 5, 9), (0, 1, 9)])
@pytest.mark.parametrize(
    ("kind", "function", "options", "output", "target"),
    [
        (nn.BCELoss, F.binary_cross_entropy, {"weight": BY_SAMPLE}, PROBABLE[:, 0], PROBABLE[:, 1]),
        (nn.BCELoss, F.binary_cross_entropy, {"weight": BY_SAMPLE[:, None]}, PROBABLE, PROBABLE),
        (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, {"weight": REAL}, REAL, PROBABLE),
        (
            nn.BCEWithLogitsLoss,
            F.binary_cross_entropy_with_logits,
            {"pos_weight": BY_SAMPLE},
            REAL[:, 0],
            PROBABLE[:, 0],
        ),
        (
            nn.MultiLabelSoftMarginLoss,
            F.multilabel_soft_margin_loss,
            {"weight": REAL},
            REAL,
            PROBABLE.round(),
        ),
    ],
)
def test_a_weight_for_each_sample_of_a_batch_is_refused(kind, function, options, output, target, cuts):
    (name,) = options
    for way in ways(kind, function, options):
        with pytest.raises(RefusedError, match=f"{name} of shape .*cannot be cut into shares"):
            in_parts(rule_for(way, CPU), output, target, cuts)


@pytest.mark.parametrize("name", ["weight", "pos_weight"])
@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (1, 1)])
def test_a_weight_that_leaves_samples_alone_is_not(name, shape):
    options = {name: torch.rand(shape, generator=G, dtype=torch.float64)}
    value, gradient = whole(nn.BCEWithLogitsLoss(**options), REAL, PROBABLE)
    for cuts in CUTS:
        own, own_gradient = in_parts(rule_for(nn.BCEWithLogitsLoss(**options), CPU), REAL, PROBABLE, cuts)
        torch.testing.assert_close(own, value, rtol=1e-13, atol=0)
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-13, atol=1e-15)


def test_a_plain_function_of_torch_is_known():
    assert rule_for(F.mse_loss, CPU).averaged
    total, weight = rule_for(F.mse_loss, CPU)(REAL, OTHER, N)
    assert float(weight) == REAL.numel()
    assert float(total) == pytest.approx(float((REAL - OTHER).square().sum()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_share_without_a_valid_label_weighs_nothing(smoothing):
    for weight in (None, WEIGHT):
        rule = rule_for(nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing), CPU)
        output = REAL[:3].clone().requires_grad_()
        total, count = rule(output, torch.full((3,), -100), 3)
        assert (float(total.detach()), float(count)) == (0.0, 0.0)
        (gradient,) = torch.autograd.grad(total, output)
        assert not gradient.any()


def test_the_loss_of_the_job_is_not_changed():
    loss = nn.CrossEntropyLoss(weight=WEIGHT.float(), reduction="sum")
    rule_for(loss, CPU, torch.float64)
    assert (loss.reduction, loss.weight.dtype) == ("sum", torch.float32)


def per_sample(output, target):
    return (output - target).square().mean(1)


def per_element(output, target):
    return (output - target).square()


def pair(output, target):
    weight = target.abs()
    return ((output - target).square() * weight).sum(), weight.sum()


def pair_of_numbers(output, target):
    return (output - target).square().sum(), 3 * len(output)


class Own(nn.Module):
    def forward(self, output, target):
        return per_sample(output, target)


class Other(nn.MSELoss):
    """A subclass of a built-in loss with arithmetic of its own."""

    def forward(self, output, target):
        return (output - target).abs().sum(1)


USERS = [
    (per_sample, lambda o, t: (o - t).square().mean()),
    (per_element, lambda o, t: (o - t).square().mean()),
    (pair, lambda o, t: ((o - t).square() * t.abs()).sum() / t.abs().sum()),
    (pair_of_numbers, lambda o, t: (o - t).square().sum() / (3 * len(o))),
    (Own(), lambda o, t: (o - t).square().mean()),
    (Other(), lambda o, t: (o - t).abs().sum(1).mean()),
]


@pytest.mark.parametrize(("loss", "right"), USERS)
@pytest.mark.parametrize("cuts", CUTS)
def test_parts_of_a_user_s_loss_add_up_to_the_whole(loss, right, cuts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, gradient = in_parts(rule_for(loss, CPU), REAL, OTHER, cuts)
    expected, expected_gradient = whole(right, REAL, OTHER)
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("cuts", [(0, 9), (0, 5, 9), (0, 1, 3, 4, 9)])
def test_a_scalar_is_a_mean_over_samples_and_doubted_once(cuts):
    rule = rule_for(lambda output, target: per_sample(output, target).mean(), CPU)
    assert rule.doubts == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, _ = in_parts(rule, REAL, OTHER, cuts)
        in_parts(rule, REAL, OTHER, cuts)
    (doubt,) = rule.doubts
    assert "the loss returned a scalar" in doubt
    assert "(sum, weight)" in doubt
    torch.testing.assert_close(value, per_sample(REAL, OTHER).mean(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("loss", [pair, per_sample])
def test_what_adds_up_is_not_doubted(loss):
    rule = rule_for(loss, CPU)
    in_parts(rule, REAL, OTHER, (0, 4, 9))
    assert rule.doubts == []


def test_a_weight_that_requires_gradients_is_an_error():
    learned = torch.ones(N, dtype=torch.float64, requires_grad=True)

    def weighed(output, target):
        return (per_sample(output, target) * learned).sum(), learned.sum()

    with pytest.raises(
        UsageError, match=r"the loss .* weight that requires gradients: a constant.*; detach it"
    ):
        rule_for(weighed, CPU)(REAL, OTHER, N)
    with pytest.raises(UsageError, match=r"the model .* weight that requires gradients"):
        rule_for(None, CPU)((REAL.sum(), learned.sum()), None, N)
    total, weight = rule_for(lambda o, t: (weighed(o, t)[0], learned.sum().detach()), CPU)(REAL, OTHER, N)
    assert (total.requires_grad, float(weight)) == (True, N)


def test_without_a_loss_the_model_s_own_pair_counts():
    rule = rule_for(None, CPU)
    total, weight = rule((REAL.sum(), 4), None, N)
    assert rule.averaged
    assert (float(total), float(weight), weight.dtype) == (float(REAL.sum()), 4.0, torch.float64)


@pytest.mark.parametrize("value", ["text", None, {"loss": 1}, 3.0])
def test_anything_else_that_a_loss_returns_is_an_error(value):
    with pytest.raises(UsageError, match=r"\(sum, weight\)"):
        rule_for(lambda output, target: value, CPU)(REAL, OTHER, N)


def test_a_loss_with_parameters_is_refused():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(UsageError, match=r"trainable parameters \(Learned\)"):
        rule_for(Learned(), CPU)


def test_an_unknown_reduction_is_an_error():
    loss = nn.MSELoss()
    loss.reduction = "median"
    with pytest.raises(UsageError, match="median"):
        rule_for(loss, CPU)


def shares(rule, output, target, cuts):
    return [rule(output[a:b], target[a:b], b - a) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [nn.MSELoss(), lambda output, target: (output - target).square()])
def test_a_half_sums_and_counts_in_single_precision(loss, dtype):
    output, target = torch.full((70_001,), 3.0, dtype=dtype), torch.zeros(70_001, dtype=dtype)
    total, weight = rule_for(loss, CPU)(output, target, len(output))
    assert (float(total), float(weight)) == (9.0 * 70_001, 70_001.0)


def test_a_half_of_a_pair_keeps_its_weight():
    def loss(output, target):
        return output.sum(), 1001

    total, weight = rule_for(loss, CPU)(torch.ones(3, dtype=torch.bfloat16), None, 3)
    assert (float(total), float(weight)) == (3.0, 1001.0)
    assert total.dtype == weight.dtype == torch.float32


@pytest.mark.parametrize(
    "loss",
    [
        nn.MultiMarginLoss(reduction="sum"),
        partial(F.mse_loss, reduction="sum"),
        partial(F.mse_loss, size_average=False),
        partial(F.gaussian_nll_loss, var=0.7, reduction="sum"),
    ],
)
def test_a_sum_of_torch_s_own_adds_up(loss):
    output = torch.randn(7, 3)
    target = torch.arange(7) % 3 if isinstance(loss, nn.MultiMarginLoss) else torch.randn(7, 3)
    rule = rule_for(loss, CPU)
    assert not rule.averaged
    parts = shares(rule, output, target, [0, 2, 7])
    torch.testing.assert_close(sum(total for total, _ in parts), loss(output, target))


CLASSES_ADVICE = r"for classes make the labels integers of shape \(5,\), as target.long\(\)"


@pytest.mark.parametrize("kind", [nn.HingeEmbeddingLoss, nn.KLDivLoss, nn.MSELoss])
@pytest.mark.parametrize(
    ("output", "target", "said"),
    [
        ((5, 1), (5,), r"stretch .* every other .*; .*: target.unsqueeze\(-1\) or output.squeeze\(-1\)"),
        ((5,), (5, 1), r"stretch .*; .*: target.squeeze\(-1\) or output.unsqueeze\(-1\)"),
        ((5, 2, 1), (5, 1, 2), r"stretch .*; .*: target.reshape\(output.shape\)"),
        ((5, 1, 2), (5, 2), r"stretch .*; .*: target.reshape\(output.shape\)"),
        ((5, 1, 1, 2), (5, 2, 1), r"stretch"),
        ((5, 2, 3), (5, 3), r": their sizes differ; let the model return as many numbers a sample as"),
        ((5, 3), (5,), rf"their sizes differ: 3 numbers a sample beside one; {CLASSES_ADVICE}"),
        ((5, 3), (5, 1), rf"stretch one over the other: 3 numbers a sample beside one; {CLASSES_ADVICE}"),
        ((5, 1), (5, 3), r"stretch one over the other; let the model return as many numbers"),
        ((5, 3), (5, 4), r": their sizes differ; let the model return as many numbers"),
    ],
)
def test_shapes_that_differ_are_refused_with_what_brings_them_together(kind, output, target, said):
    with pytest.raises(UsageError, match=said):
        rule_for(kind(), CPU)(torch.rand(output), torch.ones(target), 5)
