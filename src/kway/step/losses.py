"""Losses as a sum and a weight, so that shares of any size add up to the loss of the global batch.

The loss of a global batch is ``sum(w_i * l_i) / sum(w_i)``. A share computes its own sum and its own weight;
sums and weights add over micro-batches and devices; one division at the end gives the value and the gradient
of one device. Means never meet means.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kway.errors import RefusedError, UsageError
from kway.step.endings import Ending, as_they_are
from kway.step.followed import Followed
from kway.step.hooked_losses import knows
from kway.step.precision import wide
from kway.step.shapes import check_same_shape
from kway.step.tally import doubt_single

Tensor = torch.Tensor

# Built-in losses whose mean is the sum over all elements, divided by the number of elements.
_ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss,
    nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.MultiLabelMarginLoss, nn.MultiMarginLoss,
    nn.MultiLabelSoftMarginLoss, nn.HingeEmbeddingLoss,
)  # fmt: skip
# Of these, the ones that broadcast where the shapes of output and target differ.
_SAME_SHAPE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.KLDivLoss,
    nn.HingeEmbeddingLoss,
)  # fmt: skip
# Of these, the ones whose weights broadcast against the output.
_BROADCASTING = (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
# Built-in losses whose mean divides by the weights of the classes that are not ignored.
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.kl_div: nn.KLDivLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
}


class LossRule:
    """A loss that knows how it adds up.

    ``rule(output, target, samples)`` returns ``(total, weight)``: a differentiable scalar, the sum over the
    share, and a scalar tensor; or what an ending makes of them. ``averaged`` says whether the global value is the sum
    of totals divided by the sum of weights, or the plain sum of totals. ``doubts``: what in the loss, or in a
    metric (``Tally``), may not add up, found while it ran, each line once. ``changed``: takes over what the user has
    changed in a loss module since the last step, and says whether that was anything.

    ``builtin``: whether ``compute`` checks only, and returns what ``summed`` then computes in tensors alone, so that
    it can be compiled.
    """

    def __init__(
        self,
        compute: Callable[[Any, Any, int], tuple[Any, ...]],
        averaged: bool,
        doubts: list[str] | None = None,
        changed: Callable[[], bool] = lambda: False,
        moved: Callable[[], str | None] = lambda: None,
        made: Callable[[], str | None] = lambda: None,
        builtin: bool = False,
    ) -> None:
        self._builtin = builtin
        self.summed: Callable[..., tuple[Tensor, Tensor]] = summed
        self._compute, self.averaged, self.changed, self._moved = compute, averaged, changed, moved
        self._made = made
        self.doubts: list[str] = [] if doubts is None else doubts

    def __call__(
        self, output: Any, target: Any, samples: int, ending: Ending = as_they_are, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Compute what ``ending`` makes of total and weight of one share of ``samples`` samples."""
        computed = self._compute(output, target, samples)
        if self._builtin:
            return self.summed(*computed, ending, factor)
        total, weight = computed
        return ending(total, weight, factor)

    def check_moved(self, cut: bool) -> None:
        """Raise ``RefusedError`` where the loss has changed a buffer of its own, of a batch that is ``cut``.

        Of a whole one it is a doubt; so is one that is made, of a batch that is cut.
        """
        name = self._moved()
        if name is None:
            if cut and (new := self._made()) is not None:
                self._doubt(
                    f"the loss makes its buffer {new!r} when it is first computed, each device for itself: it "
                    "must not follow from the samples. Make it with the loss"
                )
            return
        text = f"the loss changes its buffer {name!r} when it is computed"
        do = "make the loss a part of the model, which then returns (sum, weight), and pass loss=None"
        if cut:
            why = "it is computed for each part of a batch, on each device, and each would move a copy of its own"
            raise RefusedError(text, why, f"{do}; or change the buffer between steps")
        self._doubt(f"{text}, which is in no checkpoint, and refused where a batch is cut: {do}")

    def _doubt(self, line: str) -> None:
        if line not in self.doubts:
            self.doubts.append(line)


def rule_for(
    loss: Any, device: torch.device, floating: torch.dtype | None = None, model: nn.Module | None = None
) -> LossRule:
    """Make the rule for a job's loss. ``floating``: dtype for the loss's own tensors (class weights).

    A loss module is copied, but for one that hooks or functions of ``model`` write into (``hooked_losses.knows``): no
    copy would read that.

    Raises ``UsageError`` as ``check_loss`` does. The rule raises it, too, for an output and a target of other
    shapes where they must be equal, and for what a loss of the user's own returns that is no loss or cannot add up; and
    ``RefusedError`` for a weight with an entry for each sample.
    """
    check_loss(loss)
    doubts: list[str] = []
    if loss is None:
        return LossRule(lambda output, _, samples: _own(output, samples, "the model", doubts), True, doubts)
    builtin = _as_builtin(loss)
    if builtin is None:
        fixed = ("reduction",) if _is_torch_s(loss) else ()
        own = None
        if isinstance(loss, nn.Module):
            apart = model is None or not knows(model, loss)
            own = Followed(loss, device, floating, fixed=fixed, apart=apart)
        changed = (lambda: False) if own is None else own.changed
        moved = (lambda: None) if own is None else own.moved
        made = (lambda: None) if own is None else lambda: own.made

        def call(output: Any, target: Any) -> Any:
            return (loss if own is None else own.module)(output, target)

        if _is_torch_s_sum(loss):
            return LossRule(
                lambda output, target, samples: _total(call(output, target), float(samples)),
                False,
                changed=changed,
                moved=moved,
                made=made,
            )
        return LossRule(
            lambda output, target, samples: _own(call(output, target), samples, "the loss", doubts),
            True,
            doubts,
            changed,
            moved,
            made,
        )
    placed = Followed(builtin, device, floating, _by_element, fixed=("reduction",))
    reduction = str(builtin.reduction)
    if reduction == "mean" and isinstance(builtin, nn.KLDivLoss) and _kl_mean_is_by_sample():
        reduction = "batchmean"

    def compute(output: Any, target: Any, samples: int) -> tuple[nn.Module, Any, Any, str]:
        module = placed.module
        if isinstance(module, _SAME_SHAPE):
            check_same_shape(type(module).__name__, output, target)
        _check_weights(module, output)
        if reduction == "batchmean":
            _check_samples_first(output.shape, samples, doubts)
            return module, output, target, "rows"
        indices = isinstance(target, Tensor) and not target.is_floating_point()
        by_class = reduction == "mean" and isinstance(module, _BY_CLASS) and indices
        return module, output, target, "classes" if by_class else "elements"

    return LossRule(compute, reduction != "sum", doubts, placed.changed, builtin=True)


def summed(
    module: nn.Module, output: Tensor, target: Tensor, of: str, ending: Ending, factor: float
) -> tuple[Tensor, Tensor]:
    """Compute a loss by element, and what ``ending`` makes of its sum and of the weight: a number ``of`` something."""
    if isinstance(module, _BY_CLASS):
        output, target = _classes_last(output, target)
    losses: Tensor = module(output, target)
    if of == "classes":
        return ending(*_total(losses, _class_weight(module, target)), factor)
    return ending(*_total(losses, float(losses.shape[0] if of == "rows" else losses.numel())), factor)


def _classes_last(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (N, classes, ...) as rows of classes, with their indices, where they lie in memory like that.

    torch would copy them to where its classes come second, and leave gradients there, which are copied back: of a
    model of language several times as much as all of its other activations.
    """
    last = output.movedim(1, -1) if output.dim() > 2 else output
    # Anything else, probabilities of classes and what does not fit together, is torch's to take or refuse.
    if output.dim() < 3 or target.shape != last.shape[:-1] or not last.is_contiguous():
        return output, target
    return last.reshape(-1, last.shape[-1]), target.reshape(-1)


def _by_element(module: nn.Module) -> None:
    module.reduction = "none"  # type: ignore[assignment]


def _total(losses: Tensor, weight: Tensor | float) -> tuple[Tensor, Tensor]:
    """Sum up in single precision at least: a half rounds counts above 2,048, and ends at 65,504."""
    dtype = wide(losses.dtype)
    total = losses.sum(dtype=dtype)
    return total, weight.to(dtype) if isinstance(weight, Tensor) else total.new_full((), weight)


def _check_samples_first(shape: torch.Size, samples: int, doubts: list[str]) -> None:
    """Raise ``RefusedError`` where samples lie along another dimension than the first, whose length then divides.

    Of two dimensions the first is that of rows, whatever a sample has of them: these add up, as do samples that are
    folded into a longer first dimension. Where sizes alone do not tell, it is a doubt.
    """
    if len(shape) < 3:
        return
    first, elsewhere = shape[0], samples in shape[1:-1]
    text = (
        f"KLDivLoss with reduction='batchmean' for outputs of shape {tuple(shape)} of {samples} samples",
        "torch divides by the first dimension: where that is not the samples', parts of a batch do not add up",
        "bring the samples to dimension 0, or return (sum, weight) from a loss of your own",
    )
    if first != samples and (elsewhere or first % samples):
        raise RefusedError(*text)
    if first == samples > 1 and elsewhere:
        line = ": ".join(text[:2])
        if not any("batchmean" in doubt for doubt in doubts):
            doubts.append(line)


def _kl_mean_is_by_sample() -> bool:
    """Whether the installed torch divides the mean of ``KLDivLoss`` by samples: it says that it will one day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Six elements of 1 in two samples: 1 is the mean over elements, 3 over samples.
        return float(F.kl_div(torch.full((2, 3), -1.0), torch.ones(2, 3), reduction="mean")) > 2


def _check_weights(module: nn.Module, output: Tensor) -> None:
    """Raise ``RefusedError`` for a weight that has an entry for each sample of a batch."""
    for name in ("weight", "pos_weight"):
        weight = getattr(module, name, None) if isinstance(module, _BROADCASTING) else None
        if weight is not None and weight.dim() >= output.dim() and weight.shape[-output.dim()] != 1:
            raise RefusedError(
                f"{type(module).__name__} with a {name} of shape {tuple(weight.shape)} for outputs of shape "
                f"{tuple(output.shape)}",
                "an entry for each sample of a batch cannot be cut into shares: which samples a device holds changes",
                "weigh classes (their dimension comes last), or let data carry the weights and return "
                "(sum, weight) from a loss of your own",
            )


def check_loss(loss: Any) -> None:
    """Raise ``UsageError`` for a loss with trainable parameters, or a reduction that torch does not know."""
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UsageError(
            f"a loss with trainable parameters ({type(loss).__name__})",
            "only the model's parameters are trained",
            "make it a part of the model, which then returns (sum, weight), and pass loss=None",
        )
    builtin = _as_builtin(loss)
    if builtin is not None and builtin.reduction not in ("none", "mean", "sum", "batchmean"):
        raise UsageError(f"a loss with reduction={builtin.reduction!r}", "known are none, mean, sum")


def _as_builtin(loss: Any) -> nn.Module | None:
    """Return a built-in loss as a module, or ``None`` for a loss that is the user's own."""
    if isinstance(loss, nn.Module):
        known = next((kind for kind in (*_ELEMENTWISE, *_BY_CLASS) if isinstance(loss, kind)), None)
        return loss if known is not None and type(loss).forward is known.forward else None
    function, options = _unwrapped(loss)
    if not options and (inner := _module_of(function)) is not None:
        return _as_builtin(inner)
    kind = _FUNCTIONS.get(function) if _hashable(function) else None
    if kind is None:
        return None
    try:
        return kind(**options)
    except TypeError:
        return None


def _unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function inside of partials, and the options that they give it."""
    function: Any = loss
    options: dict[str, Any] = {}
    while isinstance(function, partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    return function, options


def _module_of(function: Any) -> nn.Module | None:
    """Return the module that a function is: itself, or the one whose ``forward`` it is."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(function, "__func__", None) in (
        type(owner).forward,
        type(owner).__call__,
    ):
        return owner
    return function if isinstance(function, nn.Module) else None


def _is_torch_s_sum(loss: Any) -> bool:
    """Whether a loss is one of torch's that are not known one by one, and sums up: its parts add up as they are."""
    if isinstance(loss, nn.Module):
        return _is_torch_s(loss) and getattr(loss, "reduction", None) == "sum"
    function, options = _unwrapped(loss)
    return getattr(function, "__module__", None) == F.__name__ and options.get("reduction") == "sum"


def _is_torch_s(loss: Any) -> bool:
    """Whether a loss is a module of torch's, or one that computes as it does."""
    kind: Any = next((k for k in type(loss).__mro__ if k.__module__ == nn.MSELoss.__module__), None)
    return kind is not None and type(loss).forward is kind.forward


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


def _class_weight(module: nn.Module, target: Tensor) -> Tensor:
    """Sum the weights of the classes of all targets that are not ignored."""
    valid: Tensor = torch.ne(target, int(module.ignore_index))  # type: ignore[arg-type]
    weight = vars(module)["_buffers"].get("weight")
    if weight is None:
        return valid.sum()
    total: Tensor = weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0).sum(dtype=wide(weight.dtype))
    return total


def _own(value: Any, samples: int, who: str, doubts: list[str]) -> tuple[Tensor, Tensor]:
    """Read what a user's loss returned: per-sample losses, ``(sum, weight)``, or a scalar, which is a doubt."""
    if isinstance(value, tuple | list) and len(value) == 2:
        total, weight = value
        if isinstance(weight, torch.Tensor) and weight.requires_grad:
            # The sum of weights divides once, when all shares are there: no gradient goes through it.
            raise UsageError(
                f"{who} returned (sum, weight) with a weight that requires gradients",
                "a constant: counts or weights of samples",
                "detach it, or return per-sample losses",
            )
        dtype = wide(total.dtype)
        weight = torch.as_tensor(weight, dtype=dtype, device=total.device).detach()
        if total.dim() or weight.dim():
            raise UsageError(
                f"{who} returned a pair of shapes {tuple(total.shape)} and {tuple(weight.shape)}",
                "sum and weight must be single numbers",
                "sum them up",
            )
        return total.to(dtype), weight
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"{who} returned a {type(value).__name__}",
            "it must return per-sample losses, a pair (sum, weight) or a scalar",
        )
    if value.dim() == 0:
        doubt = (
            f"{who} returned a scalar: it is taken as a mean over the samples it saw. Return per-sample "
            "losses or (sum, weight) to be exact for any weights; a plain sum would change with the number of devices"
        )
        if doubt not in doubts:
            doubts.append(doubt)
        return _total(value.to(wide(value.dtype)) * samples, float(samples))
    doubt_single(f"{who} returned", value, samples, doubts)
    return _total(value, float(value.numel()))
