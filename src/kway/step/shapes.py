"""What is said where a loss compares numbers one by one, and output and target are not of one shape."""

from typing import Any

import torch

from kway.errors import UsageError


def check_same_shape(loss: str, output: torch.Tensor, target: Any) -> None:
    """Raise ``UsageError`` where shapes differ: with why they cannot be compared, and what brings them together."""
    if output.shape == target.shape:
        return
    got = f"{loss} of an output {tuple(output.shape)} and a target {tuple(target.shape)}"
    if _bare(output) == _bare(target):
        if _stretches(output, target):
            need = "torch would stretch one over the other, and compare every sample with every other of its share"
        else:
            need = "both must have one shape"
        raise UsageError(got, need, f"give both one shape: {_views(output, target)}")
    need = "torch would stretch one over the other" if _stretches(output, target) else "their sizes differ"
    if output.dim() > 1 and output.shape[:1] == target.shape[:1] and target.shape[1:].numel() == 1:
        raise UsageError(
            got,
            f"{need}: {output.shape[1:].numel()} numbers a sample beside one",
            f"for classes {_classes(target)}; else let the model return one number a sample",
        )
    raise UsageError(got, need, "let the model return as many numbers a sample as the target holds")


def _classes(target: torch.Tensor) -> str:
    """Say what makes classes of a target that holds one number a sample."""
    loss = "the loss cross entropy (nn.CrossEntropyLoss(), --loss cross-entropy)"
    is_whole = not (target.is_floating_point() or target.is_complex())
    if is_whole:
        is_ready = target.dim() == 1 and target.dtype is torch.int64
        return f"take {loss}" + ("" if is_ready else f", of int64 labels of shape ({len(target)},)")
    return f"make the labels integers of shape ({len(target)},), as target.long() does, and take {loss}"


def _bare(value: torch.Tensor) -> list[int]:
    return [size for size in value.shape if size != 1]


def _stretches(output: torch.Tensor, target: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(output.shape, target.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _views(output: torch.Tensor, target: torch.Tensor) -> str:
    if output.shape == (*target.shape, 1):
        return "target.unsqueeze(-1) or output.squeeze(-1)"
    if target.shape == (*output.shape, 1):
        return "target.squeeze(-1) or output.unsqueeze(-1)"
    return "target.reshape(output.shape)"
