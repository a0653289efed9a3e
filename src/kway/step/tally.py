"""Sums and weights by name, added over micro-batches, steps and ranks. Means are taken once, at the end."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kway.comm.group import Group
from kway.errors import UsageError
from kway.job import check_figure
from kway.step.lengths import Lengths, one_for_several

Tensor = torch.Tensor


class Tally:
    """Adds (sum, weight) pairs in float64 on ``device``, without reading anything back before ``result``.

    ``names`` are in every result; other names come with what is added, on any rank, in any order. Each of
    ``rows`` shares has a row of its own, so that the total does not depend on who held which share.
    ``doubts``: takes up what in the metrics may not add up, each once, by what ``lengths`` sees: one of all tallies of
    a run.
    """

    def __init__(
        self,
        names: list[str],
        device: torch.device,
        rows: int = 1,
        doubts: list[str] | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self.device, self.rows = device, rows
        self.doubts: list[str] = [] if doubts is None else doubts
        self.lengths = Lengths(self.doubts) if lengths is None else lengths
        self._names = list(names)
        self._columns: dict[str, Tensor] = {}
        # Who gave a name: two metrics that return one key must not be added up.
        self._owners: dict[str, str] = {}
        self._split: set[str] = set()

    def add(self, name: str, total: Tensor, weight: Tensor | float, row: int = 0, owner: str = "") -> None:
        """Add one pair of numbers to a share's row. ``owner``: the metric that the name is a part of.

        Raises ``UsageError`` where another metric has given a name before.
        """
        owner = owner or name
        self._check_owner(name, self._owners.setdefault(name, owner), owner)
        if name not in self._columns:
            self._columns[name] = torch.zeros(self.rows, 2, dtype=torch.float64, device=self.device)
        # Not with +=, which would write it twice.
        place = self._columns[name][row]
        place[0].add_(total.detach().to(self.device))
        place[1].add_(weight.detach().to(self.device) if isinstance(weight, Tensor) else weight)

    def add_pair(self, name: str, pair: Tensor, row: int = 0) -> None:
        """Add a sum and a weight of a metric, shape (2,) in float64 on ``device``, to a share's row: see ``add``."""
        self._check_owner(name, self._owners.setdefault(name, name), name)
        if name not in self._columns:
            self._columns[name] = torch.zeros(self.rows, 2, dtype=torch.float64, device=self.device)
        self._columns[name][row].add_(pair)

    def restart(self) -> None:
        """Forget the sums."""
        self._columns = {}

    def merge(self, other: "Tally") -> None:
        """Add all that ``other``, of as many rows, holds. Raises ``UsageError`` as ``add`` does."""
        for name, owner in other._owners.items():
            self._check_owner(name, self._owners.setdefault(name, owner), owner)
            if name not in self._columns:
                self._columns[name] = torch.zeros(self.rows, 2, dtype=torch.float64, device=self.device)
        self._split |= other._split
        if names := [*other._columns]:
            torch._foreach_add_([self._columns[n] for n in names], [other._columns[n] for n in names])

    def split(self, name: str) -> None:
        """Note that ``name`` gives names of its own, and is none of the results unless it is added as well."""
        self._split.add(name)

    def result(self, group: Group) -> dict[str, tuple[float, float]]:
        """Return {name: (sum, weight)} over all shares, added in their order. A collective.

        Names that were asked for come first, then others in alphabetical order: the same on all ranks. Every
        row is written by one rank and zero on the others, so that summing over ranks is exact. Raises
        ``UsageError`` where metrics of two names gave one name on different ranks.
        """
        owners: dict[str, str] = {}
        split: set[str] = set()
        for own, parted in group.objects((self._owners, self._split)):
            split |= parted
            for name, owner in own.items():
                self._check_owner(name, owners.setdefault(name, owner), owner)
        names = [name for name in self._names if name in owners or name not in split]
        names += sorted(owners.keys() - set(names))
        if not names:
            return {}
        empty = torch.zeros(self.rows, 2, dtype=torch.float64, device=self.device)
        table = torch.stack([self._columns.get(name, empty) for name in names], 1)
        added = group.sum_(table).sum(0).tolist()
        return {name: (pair[0], pair[1]) for name, pair in zip(names, added, strict=True)}

    def state(self, group: Group) -> dict[str, Any]:
        """Return what was added so far, by all ranks, without reading it back. A collective."""
        if not self._names:
            return {"owners": {}, "split": [], "columns": {}}
        every = group.objects((self._owners, sorted(self._split)))
        owners = {name: owner for own, _ in every for name, owner in own.items()}
        empty = torch.zeros(self.rows, 2, dtype=torch.float64, device=self.device)
        columns = {name: self._columns.get(name, empty).clone() for name in sorted(owners)}
        for column in columns.values():
            group.sum_(column)
        return {
            "owners": owners,
            "split": sorted({name for _, split in every for name in split}),
            "columns": columns,
        }

    def load(self, state: Mapping[str, Any], rows: range) -> None:
        """Go on from what ``state`` gave, on the rank that adds to ``rows``.

        Where there were other rows then, all that was added goes into the first one.
        """
        # A metric that the job no longer has is left out.
        self._owners = {name: owner for name, owner in state["owners"].items() if owner in self._names}
        self._split = set(state["split"]).intersection(self._names)
        for name in self._owners:
            saved = state["columns"][name]
            column = torch.zeros(self.rows, 2, dtype=torch.float64, device=self.device)
            if len(saved) == self.rows:
                column[rows.start : rows.stop] = saved[rows.start : rows.stop].to(self.device)
            elif rows.start == 0:
                column[0] = saved.sum(0).to(self.device)
            self._columns[name] = column

    def _check_owner(self, name: str, first: str, second: str) -> None:
        if first != second:
            raise UsageError(
                f"metrics {first!r} and {second!r} both return {name!r}",
                "figures are added up by name",
                "rename one of them",
            )


def mean(pair: tuple[float, float]) -> float:
    """Return sum / weight, NaN where nothing was weighed."""
    return pair[0] / pair[1] if pair[1] else float("nan")


@torch.no_grad()
def measure(
    metrics: Mapping[str, Callable[..., Any]],
    output: Any,
    target: Any,
    samples: int,
    tally: Tally,
    row: int = 0,
    right: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Add every metric of one share of ``samples`` samples to its row of ``tally``.

    ``right``: ``right_ones``, in whatever form it runs fastest.

    A metric returns per-sample values of any shape, a pair (sum, weight), or a scalar, which counts once a
    sample; or a dict of these, each under its own name and with its own weight. Raises ``UsageError`` for
    anything else, and for a name in a dict that means something else in the record.
    """
    for metric_name, metric in metrics.items():
        if metric is accuracy and right is not None and _are_several(output, target):
            tally.add_pair(metric_name, right(output, target), row)
            continue
        value = metric(output, target)
        if not isinstance(value, Mapping):
            said = f"metric {metric_name!r} returned"
            total, weight, shape = _pair(said, value, samples, "or a dict of these")
            tally.add(metric_name, total, weight, row)
            tally.lengths.see(metric_name, {said: shape} if shape else {}, samples)
            continue
        tally.split(metric_name)
        shapes: dict[str, torch.Size] = {}
        for name, part in value.items():
            check_figure(name, f"a key {name!r} of metric {metric_name!r}")
            said = f"metric {metric_name!r} returned, for {name!r},"
            total, weight, shape = _pair(said, part, samples)
            tally.add(name, total, weight, row, metric_name)
            if shape:
                shapes[said] = shape
        tally.lengths.see(metric_name, shapes, samples)


def _are_several(output: Any, target: Any) -> bool:
    """Whether a metric gets tensors of several samples: of one value it is doubted what it stands for."""
    return isinstance(output, Tensor) and isinstance(target, Tensor) and target.dim() > 0 and len(target) > 1


def doubt_single(what: str, values: Tensor, samples: int, doubts: list[str]) -> None:
    """Note that one value for several samples may be meant as their mean. The only one that counts looks the same."""
    if values.numel() == 1 and samples > 1:
        doubt = one_for_several(what, values.shape)
        if doubt not in doubts:
            doubts.append(doubt)


def _pair(what: str, value: Any, samples: int, more: str = "") -> tuple[Tensor, Tensor | float, torch.Size]:
    """Read one figure of a share as (sum, weight, shape of the per-sample values); without a dimension: of others."""
    if isinstance(value, tuple | list) and len(value) == 2:
        total, weight = (torch.as_tensor(part, dtype=torch.float64) for part in value)
        if total.dim() or weight.dim():
            raise UsageError(
                f"{what} a pair of shapes {tuple(total.shape)} and {tuple(weight.shape)}",
                "sum and weight must be single numbers",
                "return values of several elements as one tensor",
            )
        return total, weight, torch.Size()
    if isinstance(value, torch.Tensor | int | float):
        # A Python number would pass through single precision on its way to a tensor.
        values = torch.as_tensor(value, dtype=torch.float64).detach()
        if values.dim() == 0:
            return values * samples, float(samples), values.shape
        return values.sum(), float(values.numel()), values.shape
    needed = ["per-sample values", "a pair (sum, weight)", "a number", *([more] if more else [])]
    raise UsageError(f"{what} a {type(value).__name__}", f"it must be {', '.join(needed)}")


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return 1.0 for each sample whose largest output is at the target class, else 0.0.

    ``output``: (N, classes, ...); ``target``: class indices (N, ...) or class probabilities like ``output``.
    """
    classes = target.argmax(1) if target.is_floating_point() else target
    return (output.argmax(1) == classes).double()


def right_ones(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum of ``accuracy`` over samples, and of how many, shape (2,)."""
    right = accuracy(output.detach(), target)
    return torch.stack([right.sum(), right.new_full((), right.numel())])
