"""Hooks on the gradients of parameters, which torch leaves behind where it copies or pickles them."""

from typing import Any


def hooks_on(parameter: Any) -> list[list[Any]]:
    """Return the hooks on a parameter's gradient: those before it is added up, and those after; none is ``[]``.

    None either of a frozen parameter: torch hangs no hook on one, so that those which it had before it was frozen are
    lost with a copy, also where that is trained later.
    """
    tables = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    found = [[*(table or {}).values()] for table in tables] if parameter.requires_grad else []
    return found if any(found) else []


def hang(parameter: Any, hooks: list[list[Any]]) -> None:
    """Give a trained parameter what ``hooks_on`` gave of another."""
    before, after = hooks or ([], [])
    for hook in before:
        parameter.register_hook(hook)
    for hook in after:
        parameter.register_post_accumulate_grad_hook(hook)
