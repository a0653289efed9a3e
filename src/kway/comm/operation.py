"""A gather over a group of ranks as one operation of torch's: a compiler takes it whole, and looks at all around it."""

from itertools import count
from typing import Any

import torch

from kway.comm.group import Group

Tensor = torch.Tensor
_SPACE = "kway"


class GatherOperation:
    """``gather(tensor, after, of)`` is ``group.stack(tensor, of)``, from registered to ``close``.

    A compiler may put operations that do not need each other's results in another order, and not the same one on each
    rank: a gather comes behind what made the tensor ``after``, of which it reads nothing. ``group`` has several ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        library: Any = torch.library.Library
        self._library = library(_SPACE, "FRAGMENT")
        name = next(name for name in (f"stack_{number}" for number in count()) if self._defines(name))
        self._library.impl(name, self._gathered, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_SPACE}::{name}", self._shaped, lib=self._library)
        self.gather: Any = getattr(getattr(torch.ops, _SPACE), name).default

    def close(self) -> None:
        """Take the operation back. Its name, which is part of compiled code that torch keeps, is free for the next."""
        self._library._destroy()

    def _defines(self, name: str) -> bool:
        try:
            self._library.define(f"{name}(Tensor tensor, Tensor after, str of) -> Tensor")
        except RuntimeError as error:
            # Another job of this process, which is open too, has taken it. Whatever else is wrong is so of each name.
            if "multiple times" not in str(error):
                raise
            return False
        return True

    def _gathered(self, tensor: Tensor, after: Tensor, of: str) -> Tensor:
        return self._group.stack(tensor, of)

    def _shaped(self, tensor: Tensor, after: Tensor, of: str) -> Tensor:
        return tensor.new_empty((self._group.size, *tensor.shape))
