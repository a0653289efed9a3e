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


_ATTENTION = nn.functional.scaled_dot_product_attention


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
        for function, quiet in {**dict.fromkeys(_FUNCTIONS, _same), _ATTENTION.__name__: _attention}.items():
            if getattr(nn.functional, function) is quiet:
                # Another thread of this process has done so, and undoes it after the last step of all.
                continue
            stack.enter_context(patch.object(nn.functional, function, quiet))
        try:
            yield names
        finally:
            for module, attribute, value in silenced:
                setattr(module, attribute, value)


def _same(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return input


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    return _ATTENTION(query, key, value, attn_mask, 0.0, *args, **kwargs)
