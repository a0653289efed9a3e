"""Hooks on the gradients of parameters, which torch leaves behind where it copies or pickles them."""

from typing import Any

_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_on(parameter: Any) -> list[dict[int, Any] | None]:
    """Return torch's tables of the hooks on a parameter's gradient: those before it is added up, and those after.

    The tables themselves: the handles of hooks know them, and remove hooks from them. Without a hook ``[]``, and so for
    a frozen parameter: torch hangs no hook on one, so that those which it had before it was frozen are lost with a
    copy, also where that is trained later.
    """
    found = [getattr(parameter, name) for name in _TABLES] if parameter.requires_grad else []
    return found if any(found) else []


def hang(parameter: Any, tables: list[dict[int, Any] | None]) -> None:
    """Give a trained parameter the tables of its own, as ``hooks_on`` gave them of another."""
    from torch.utils.hooks import RemovableHandle

    for name, table in zip(_TABLES, tables, strict=True):
        if table:
            setattr(parameter, name, table)
            # A hook to come must not take the place of one of these, which another process has numbered.
            RemovableHandle.next_id = max(RemovableHandle.next_id, 1 + max(table))
