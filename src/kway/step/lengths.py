"""Whether one value that a metric returns for several samples is that of one of them, or their mean."""

from collections.abc import Mapping

import torch

# In so many shares in a row one value, before it passes for a mean: of samples that are chosen it is one now and then.
_ENOUGH = 4
_NO_MEAN = -1


class Lengths:
    """Looks at how many values each figure of a metric has, share by share, and never at the values.

    Values of samples that a metric chooses (those of one class, say) are as many as the share has of them: now one, now
    more, now none. Where a metric divides a share, its parts add up to all samples. What was one value each time is
    noted in ``doubts``, once, and taken from there where a later share shows that it is none.
    """

    def __init__(self, doubts: list[str]) -> None:
        self._doubts = doubts
        # By metric and by what is said of a figure of it: in how many shares it was one value so far.
        self._single: dict[str, dict[str, int]] = {}
        self._said: dict[str, str] = {}

    def see(self, metric: str, shapes: Mapping[str, torch.Size], samples: int) -> None:
        """Take note of one share of ``samples`` samples. ``shapes``: of what ``metric`` gave as per-sample values, by
        what is said of it.
        """
        if samples < 2:
            return
        is_first = metric not in self._single
        single = self._single.setdefault(metric, {})
        divides = len(shapes) > 1 and sum(shape.numel() for shape in shapes.values()) == samples
        for what in [*single]:
            if what not in shapes:
                self._clear(single, what)
        for what, shape in shapes.items():
            count = single.setdefault(what, 0 if is_first else _NO_MEAN)
            if shape.numel() != 1:
                self._clear(single, what)
            elif count != _NO_MEAN and not divides:
                single[what] = count + 1
                if single[what] == _ENOUGH:
                    self._note(what, shape)

    def _note(self, what: str, shape: torch.Size) -> None:
        self._said[what] = one_for_several(what, shape)
        if self._said[what] not in self._doubts:
            self._doubts.append(self._said[what])

    def _clear(self, single: dict[str, int], what: str) -> None:
        single[what] = _NO_MEAN
        line = self._said.pop(what, None)
        if line in self._doubts:
            self._doubts.remove(line)


def one_for_several(what: str, shape: torch.Size) -> str:
    """Say that one value for several samples may be meant as their mean."""
    return (
        f"{what} one value of shape {tuple(shape)} for several samples: it is taken as that of one of them. "
        "A mean over all of them would change with the number of devices: return it without a dimension, or as "
        "(sum, weight)"
    )
