"""Losses that a property test draws from: all of torch's that kway knows, as modules and functions, and own ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__kway_by_value__ = True

Tensor = torch.Tensor
IGNORED = -100
MEANS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Kind:
    """A loss as torch has it. ``target(scores' shape, generator)`` makes labels; ``options`` has choices by name.

    ``class_weight``: takes ``weight`` of shape (classes,); ``by_class``: its labels can be ignored.
    """

    module: type[nn.Module]
    function: Callable[..., Tensor]
    target: Callable[[tuple[int, ...], torch.Generator], Tensor]
    head: str = "raw"
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    class_weight: bool = False
    by_class: bool = False
    reductions: tuple[str, ...] = MEANS


def real(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g)


def sign(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(2, shape, generator=g) * 2.0 - 1


def share_of_one(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g)


def counts(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(4, shape, generator=g).float()


def distribution(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g).softmax(1)


def label(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(shape[1], (shape[0], *shape[2:]), generator=g)


def label_sets(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    order = torch.rand(shape, generator=g).argsort(1)
    kept = torch.randint(1, shape[1], (shape[0], 1), generator=g)
    return torch.where(torch.arange(shape[1]) < kept, order, -1)


KINDS = {
    "mse": Kind(nn.MSELoss, F.mse_loss, real),
    "l1": Kind(nn.L1Loss, F.l1_loss, real),
    "smooth l1": Kind(nn.SmoothL1Loss, F.smooth_l1_loss, real, options={"beta": (0.5, 1.0)}),
    "huber": Kind(nn.HuberLoss, F.huber_loss, real, options={"delta": (0.5, 1.0)}),
    "bce": Kind(nn.BCELoss, F.binary_cross_entropy, share_of_one, "sigmoid", class_weight=True),
    "bce logits": Kind(
        nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, share_of_one, class_weight=True,
        options={"pos_weight": (None, torch.tensor(2.5))},
    ),
    "kl": Kind(nn.KLDivLoss, F.kl_div, distribution, "log_softmax", reductions=(*MEANS, "batchmean")),
    "poisson": Kind(nn.PoissonNLLLoss, F.poisson_nll_loss, counts, options={"full": (False, True)}),
    "soft margin": Kind(nn.SoftMarginLoss, F.soft_margin_loss, sign),
    "hinge embedding": Kind(nn.HingeEmbeddingLoss, F.hinge_embedding_loss, sign, options={"margin": (1.0, 3.0)}),
    "multilabel margin": Kind(nn.MultiLabelMarginLoss, F.multilabel_margin_loss, label_sets),
    "multilabel soft margin": Kind(
        nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss, share_of_one, class_weight=True
    ),
    "multi margin": Kind(
        nn.MultiMarginLoss, F.multi_margin_loss, label, class_weight=True, options={"p": (1, 2)}
    ),
    "probabilities": Kind(
        nn.CrossEntropyLoss, F.cross_entropy, distribution, class_weight=True,
        options={"label_smoothing": (0.0, 0.1)},
    ),
    "cross entropy": Kind(
        nn.CrossEntropyLoss, F.cross_entropy, label, class_weight=True, by_class=True,
        options={"label_smoothing": (0.0, 0.2)},
    ),
    "nll": Kind(nn.NLLLoss, F.nll_loss, label, "log_softmax", class_weight=True, by_class=True),
}  # fmt: skip


def by_sample(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).sum(1)


def by_element(output: Tensor, target: Tensor) -> Tensor:
    return torch.log(torch.cosh(output - target))


def pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh a sample by its target: some weigh nothing."""
    weight = target[:, 0].clamp(min=0)
    return (by_sample(output, target) * weight).sum(), weight.sum()


def masked_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Count the tokens that are not ignored."""
    losses = F.cross_entropy(output, target, ignore_index=IGNORED, reduction="none")
    return losses.sum(), (target != IGNORED).sum()


def scalar(output: Tensor, target: Tensor) -> Tensor:
    return by_sample(output, target).mean()


OWN = {"by sample": by_sample, "by element": by_element, "pair": pair, "scalar": scalar}


def made(kind: Kind, options: dict[str, Any], as_function: bool) -> Any:
    """Make the loss, as a module or as a function of torch with its options fixed."""
    return partial(kind.function, **options) if as_function else kind.module(**options)
