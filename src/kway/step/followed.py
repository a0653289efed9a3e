"""A loss module of the user's, as it is at each step: a loop may change it, as for a schedule of its weights."""

import copy
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import nn

from kway.errors import UsageError
from kway.step.copying import apart

_VALUES = (bool, int, float, complex, str, type(None))
_TABLES = ("", "_parameters", "_buffers")
# Containers in containers that are looked into: deeper ones count by which object they are.
_DEEPEST = 8
Key = tuple[int, str, str]


class Followed:
    """A copy of ``source`` on ``device``, its tensors of dtype ``floating`` where that is given.

    ``prepare`` changes the copy. ``fixed``: attributes that must stay as they were. The user's own stays where it is,
    and as it is. What the copy has changed by itself stays, too: only what is another in the user's own is taken over.
    Not ``apart``: no copy, but ``source`` itself, as where hooks or functions of the model write into it. It is moved,
    then, and nothing needs to be taken over.
    Raises ``UsageError`` for trained parameters that ``source`` holds where torch does not look for them.

    Not seen is what is written through ``.data``, or changed inside of an object that is neither module, tensor nor
    container.
    """

    def __init__(
        self,
        source: nn.Module,
        device: torch.device,
        floating: torch.dtype | None,
        prepare: Callable[[nn.Module], None] = lambda module: None,
        fixed: tuple[str, ...] = (),
        apart: bool = True,
    ) -> None:
        self._source, self._device, self._floating, self._prepare = source, device, floating, prepare
        self._fixed = [(0, "", name) for name in fixed]
        self._seen: dict[Key, _Look] = {}
        self._glance: _Glance | None = None
        self._parts = _parts(source)
        if apart:
            self._seen, self._glance = _looks(source), _Glance(source)
        self.module = (_copied(source, source) if apart else source).to(device=device, dtype=floating)
        prepare(self.module)
        self._kept = _buffers(self.module)
        self._laid_out: set[tuple[int, str]] = set()
        # A buffer that ``moved`` has found to be new.
        self.made: str | None = None

    def changed(self) -> bool:
        """Whether the user's own was changed since the last time; ``module`` then has what changed there.

        Raises ``UsageError`` for modules that were added, removed or replaced inside, and for what is ``fixed``.
        """
        if self._glance is None or self._glance.holds():
            return False
        parts = _parts(self._source)
        if parts != self._parts:
            name = next(n for n in {**self._parts, **parts} if parts.get(n) != self._parts.get(n))
            raise UsageError(
                f"module {name!r} of the loss {type(self._source).__name__} was added, removed or replaced after the "
                "run began",
                "a loss keeps the modules that it was made of",
                "change their attributes, or go on in a new run (init=)",
            )
        now = _looks(self._source)
        other = [key for key in {**self._seen, **now} if self._seen.get(key, self) != now.get(key, self)]
        if not other:
            self._glance = _Glance(self._source)
            return False
        for _, _, name in set(self._fixed).intersection(other):
            raise UsageError(
                f"{name} of the loss {type(self._source).__name__} was changed after the run began",
                "how a loss adds up holds for the whole run",
                "go on in a new run (init=)",
            )
        self._seen, self._glance = now, _Glance(self._source)
        own, held = list(self._source.modules()), list(self.module.modules())
        for number, table, name in other:
            if number < min(len(own), len(held)):
                taken = _table(held[number], table)
                self._take_over(_table(own[number], table), taken, name)
                self._laid_out.discard((id(taken), name))
        self._prepare(self.module)
        self._kept = _buffers(self.module)
        return True

    def moved(self) -> str | None:
        """Name a buffer that the copy has changed by itself since the user's own was last taken over, if any.

        Another dtype or device alone is no change: ``self.weight = self.weight.to(output)``.
        """
        self.made = None
        other = [
            (table, name, held)
            for table, name, held, version in self._kept
            if not _is(table, name, held, version)
        ]
        for table, name, held in other:
            now = table.get(name)
            # Made when it is first computed: what follows shows whether it stays.
            made = held is None and now is not None
            if made:
                self.made = name
            elif self._is_laid_out(table, name, now, held):
                pass
            elif now is None or held is None or now is held or not _equal(now, held):
                return name
        if other or sum(len(inner._buffers) for inner in self.module.modules()) != len(self._kept):
            known = {(id(table), name) for table, name, _, _ in self._kept}
            self._kept = _buffers(self.module)
            new = (name for table, name, _, _ in self._kept if (id(table), name) not in known)
            self.made = next(new, self.made)
        return None

    def _is_laid_out(
        self, table: dict[str, Any], name: str, now: torch.Tensor | None, held: torch.Tensor | None
    ) -> bool:
        """Whether a buffer has the same numbers in another shape for the first time: it may be laid out once."""
        if now is None or held is None or now.shape == held.shape or now.numel() != held.numel():
            return False
        first = (id(table), name) not in self._laid_out
        self._laid_out.add((id(table), name))
        return first and _equal(now.reshape(-1), held.reshape(-1))

    def _take_over(self, own: dict[str, Any], held: dict[str, Any], name: str) -> None:
        if name not in own:
            held.pop(name, None)
            return
        value = own[name]
        if isinstance(value, torch.Tensor):
            # Not by deepcopy, which refuses what was computed from parameters.
            dtype = self._floating if value.is_floating_point() else None
            moved = value.detach().to(device=self._device, dtype=dtype, copy=True)
            value = nn.Parameter(moved, value.requires_grad) if isinstance(value, nn.Parameter) else moved
        else:
            value = _copied(value, self._source)
        held[name] = value


def _copied(value: Any, loss: nn.Module) -> Any:
    """Copy ``value``, which ``loss`` holds. Raises ``UsageError`` where a trained parameter is in it."""
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(item, loss) for item in value)
    if type(value) is dict:
        return {key: _copied(item, loss) for key, item in value.items()}
    memo = apart(value)
    made = copy.deepcopy(value, memo)
    if any(isinstance(each, nn.Parameter) and each.requires_grad for each in memo.values()):
        raise UsageError(
            f"a loss ({type(loss).__name__}) that holds a model, or parameters, in an attribute",
            "every device computes with a copy of the loss: gradients would reach the copies, and train nothing",
            "let the model return what the loss needs of it, freeze what is not trained (requires_grad_(False)), "
            "or make the loss a part of the model, which then returns (sum, weight), and pass loss=None",
        )
    return made


class _Glance:
    """A module as it was, by which objects are where: what every step asks, in a few microseconds.

    What is in its lists and dicts is compared value by value, a microsecond each.
    """

    def __init__(self, source: nn.Module) -> None:
        own = [vars(module) for module in source.modules()]
        inner = [table[name] for table in own for name in (*_TABLES[1:], "_modules")]
        self._tables = [(table, tuple(table), tuple(table.values())) for table in (*own, *inner)]
        values = [value for _, _, held in self._tables for value in held]
        self._tensors = [(value, _version(value)) for value in values if isinstance(value, torch.Tensor)]
        known = {id(table) for table in inner}
        containers = [v for v in values if isinstance(v, list | tuple | dict) and id(v) not in known]
        # Most are torch's own, of hooks.
        self._empty = [value for value in containers if not value]
        self._full = [(value, _Look(value)) for value in containers if value]

    def holds(self) -> bool:
        """Whether nothing was touched. Where something was, it may say the same as before."""
        return (
            all(
                tuple(table) == names and all(map(is_, table.values(), held))
                for table, names, held in self._tables
            )
            and all(_version(tensor) == version for tensor, version in self._tensors)
            and not any(self._empty)
            and all(_Look(value) == look for value, look in self._full)
        )


class _Look:
    """A value as it was: plain ones by what they say, containers by what is in them, all others by which object and
    version it is, and held.
    """

    def __init__(self, value: Any, depth: int = 0) -> None:
        # By its text, of which a NaN is equal to itself.
        self._said = repr(value) if isinstance(value, _VALUES) else None
        self._version = _version(value) if isinstance(value, torch.Tensor) else 0
        self._inner: list[_Look] | None = None
        if isinstance(value, list | tuple | dict) and depth < _DEEPEST:
            inside = [*value, *(value.values() if isinstance(value, dict) else ())]
            self._inner = [_Look(item, depth + 1) for item in inside]
        self._value = value if self._said is None and self._inner is None else type(value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Look)
            and self._value is other._value
            and (self._said, self._version, self._inner) == (other._said, other._version, other._inner)
        )

    def __hash__(self) -> int:
        return hash((self._said, id(self._value)))


def _buffers(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor | None, int]]:
    """List the buffers of a module and those inside: where each is held, and its version."""
    tables = [inner._buffers for inner in module.modules()]
    return [
        (table, name, held, 0 if held is None else _version(held))
        for table in tables
        for name, held in table.items()
    ]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors compute alike: of one shape but for dimensions of 1 in front, with the same numbers in one
    dtype, a NaN like any other.
    """
    while one.dim() > other.dim() and one.shape[0] == 1:
        one = one[0]
    while other.dim() > one.dim() and other.shape[0] == 1:
        other = other[0]
    if one.shape != other.shape:
        return False
    other = other.to(one)
    # A second look, for the few that hold one: some dtypes do not know it.
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _is(table: dict[str, Any], name: str, held: torch.Tensor | None, version: int) -> bool:
    return table.get(name) is held and (held is None or _version(held) == version)


def _version(tensor: torch.Tensor) -> int:
    # What was made in inference mode has none.
    return 0 if tensor.is_inference() else tensor._version


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    own = vars(module)
    return own[name] if name else own


def _parts(source: nn.Module) -> dict[str, nn.Module]:
    """Return which modules are inside, by every name that they have."""
    return dict(source.named_modules(remove_duplicate=False))


def _looks(source: nn.Module) -> dict[Key, _Look]:
    """Return what may be changed in a module and those inside, by number of the module, table and name."""
    return {
        (number, table, name): _Look(value)
        for number, module in enumerate(source.modules())
        for table in _TABLES
        for name, value in _table(module, table).items()
        if table or name not in {"_parameters", "_buffers", "_modules"}
    }
