"""Plain values, and what of lists, tuples and dicts tells one piece of code from another."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch

# What is written as it is. Subclasses may write themselves by code of the user's.
PLAIN: Mapping[type, Any] = {
    kind: kind.__repr__
    for kind in (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
}
# No more of a list is looked at: tables of what is called are short.
MOST_ITEMS = 256


def holds_nothing(value: Any, plain: bool) -> bool:
    """Whether ``value`` is a list, tuple or dict without what counts: code, and ``plain`` values where they do.

    How far one has grown would count otherwise.
    """
    if plain or not isinstance(value, dict | list | tuple):
        return isinstance(value, dict | list | tuple) and not len(value)
    waiting: list[Any] = [value]
    seen = 0
    while waiting and seen < MOST_ITEMS:
        each = waiting.pop()
        seen += 1
        if isinstance(each, dict | list | tuple):
            waiting += islice(inside(each), MOST_ITEMS)
        elif type(each) not in PLAIN and not isinstance(each, torch.Tensor):
            return False
    return True


def inside(value: Any) -> Iterable[Any]:
    """Return what a dict, list or tuple holds, whatever its class makes of that."""
    if isinstance(value, dict):
        return dict.values(value)
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
