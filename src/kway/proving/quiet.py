"""Dropout off, for comparing two runs that draw other masks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_FUNCTIONS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[list[str]]:
    """While open, nothing in ``model`` drops out. Yields the names of the layers that would have."""
    silenced: list[tuple[nn.Module, str, float]] = []
    names = []
    for name, module in model.named_modules():
        for attribute in ("p",) if isinstance(module, _DropoutNd) else ("dropout",):
            value = getattr(module, attribute, None)
            if isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
                silenced.append((module, attribute, float(value)))
                names.append(name or type(module).__name__)
                setattr(module, attribute, 0.0)
    with ExitStack() as stack:
        for function in _FUNCTIONS:
            if getattr(nn.functional, function) is _same:
                # Another thread of this process has done so, and undoes it after the last step of all.
                continue
            stack.enter_context(patch.object(nn.functional, function, _same))
        try:
            yield names
        finally:
            for module, attribute, value in silenced:
                setattr(module, attribute, value)


def _same(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return input
