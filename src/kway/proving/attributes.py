"""What the modules of a reference's model keep beside tensors: a step that is taken again begins with the same.

It shares nothing with ``kway.step`` on purpose: what is proved must not be judged by its own rule.
"""

from typing import Any

import torch
from torch import nn

Kept = list[tuple[nn.Module, dict[str, Any]]]

_OF_TORCH = frozenset(vars(nn.Module()))


def attributes_of(model: nn.Module) -> Kept:
    """List every module with the objects that it holds by name, but torch's own and those of a forward pass."""
    return [
        (module, {n: v for n, v in vars(module).items() if n not in _OF_TORCH and not _of_a_pass(v)})
        for module in model.modules()
    ]


def give_back(kept: Kept) -> None:
    """Have every module hold what it held, and nothing else. What changed inside of an object stays changed."""
    for module, values in kept:
        own = vars(module)
        for name in [n for n, v in own.items() if n not in _OF_TORCH | values.keys() and not _of_a_pass(v)]:
            del own[name]
        tables = [own.get(table, ()) for table in ("_parameters", "_buffers", "_modules")]
        own.update({n: v for n, v in values.items() if not any(n in table for table in tables)})


def _of_a_pass(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
