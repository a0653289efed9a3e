"""What lies in the containers and plain objects of a model, and of functions around it: a look between two steps.

A recorded step holds numbers of the host as they were. Whoever changes one where it lies, as in
``model.scales["aux"] = 0.1``, leaves every attribute the same object.

Nothing of the user's runs in a look: see ``kway.step.holders``.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dis import get_instructions
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from kway.step.alike import DEPTH, MOST, MOST_OF_ONE, PLAIN, alike, same
from kway.step.holders import (
    ATTRIBUTES,
    CONTAINERS,
    FIXED,
    NUMBERS,
    Holder,
    Names,
    Read,
    container,
    holders_of,
    is_the_users,
)


class Root(NamedTuple):
    """What is looked into. ``place`` says where something lies, by the way to it, which begins with ``path``.

    ``ours``: whether objects of kway's own are looked into as well.
    """

    value: Any
    place: Callable[[str], str]
    path: str = ""
    depth: int = DEPTH
    ours: bool = False


class Contents:
    """Which objects and numbers lie in some roots, a few levels deep, but for modules among ``known``.

    ``groups``: roots that have a limit of entries together: what holds much hides nothing in the next group.
    What a function closes over counts. Tensors count as objects: work that was recorded reads their numbers itself;
    ``tensors``: those that lie there, kway's own left out, each with its place. ``failed`` says what could not be
    looked at.
    """

    def __init__(self, *groups: Iterable[Root], known: Collection[nn.Module] = ()) -> None:
        self.failed: str | None = None
        self.tensors: list[tuple[str, torch.Tensor]] = []
        # Held, so that no other object can take the place of one.
        self._full: list[tuple[Any, Read, Sequence[Any]]] = []
        self._sizes: list[tuple[Any, Callable[[Any], int], int]] = []
        # Most are torch's own, of hooks.
        self._empty: list[Any] = []
        # What says where these are: of the full ones, and of all others with their sizes.
        self._where: list[tuple[Root, Names]] = []
        self._bare: list[tuple[Root, Any, int]] = []
        for roots in groups:
            self._look_into(roots, known)

    def unchanged(self) -> bool:
        """Whether the same lies there."""
        return (
            not any(self._empty)
            and (not self._sizes or all(size(value) == known for value, size, known in self._sizes))
            and all(same(read(value), known) for value, read, known in self._full)
        )

    def change(self) -> str | None:
        """Say where something else lies now, or ``None``."""
        for root, value, size in self._bare:
            if container(type(value)).__len__(value) != size:
                return _place(root)
        for (root, names), (value, read, known) in zip(self._where, self._full, strict=True):
            now = read(value)
            if not same(now, known):
                pairs = enumerate(zip(now, known, strict=False))
                number = next((n for n, (a, b) in pairs if not alike(a, b)), None)
                one = number is not None and len(now) == len(known)
                return _place(root, _way(names, known, number or 0) if one else "")
        return None

    def _look_into(self, roots: Iterable[Root], known: Collection[nn.Module]) -> None:
        self._left = MOST
        self._waiting = deque(roots)
        seen = {id(module) for module in known}
        while self._waiting and self._left > 0:
            root = self._waiting.popleft()
            if type(root.value) in PLAIN or id(root.value) in seen:
                continue
            seen.add(id(root.value))
            if issubclass(type(root.value), torch.Tensor):
                self.tensors += [] if root.ours else [(_place(root), root.value)]
                continue
            try:
                self._waiting += (
                    root._replace(value=part, path=root.path + way) for part, way in _parts(root.value)
                )
                for holder in holders_of(root.value, root.ours):
                    if holder.value is root.value or id(holder.value) not in seen:
                        seen.add(id(holder.value))
                        self._add(root, holder)
            except Exception as error:
                self.failed = self.failed or f"{_place(root)} cannot be looked at ({type(error).__name__})"

    def _add(self, root: Root, holder: Holder) -> None:
        value, read, size, names = holder
        if size > MOST_OF_ONE:
            self._sizes.append((value, container(type(value)).__len__, size))
            self._bare.append((root, value, size))
            return
        inside = read(value)
        self._left -= len(inside)
        if not inside and type(value) in CONTAINERS:
            self._empty.append(value)
            self._bare.append((root, value, 0))
        elif not issubclass(type(value), FIXED) or names != NUMBERS:
            self._full.append((value, read, inside))
            self._where.append((root, names))
        if root.depth > 1:
            self._waiting += (
                root._replace(value=entry, path=root.path + _way(names, inside, number), depth=root.depth - 1)
                for number, entry in enumerate(inside)
                if type(entry) not in PLAIN
            )


def _parts(value: Any) -> Iterator[tuple[Any, str]]:
    """Yield what stands for a method or a partial function, and modules that a function reads as global variables,
    each with the way to it.
    """
    if type(value) is MethodType:
        yield from ((value.__self__, ""), (value.__func__, ""))
    elif issubclass(type(value), partial):
        for name, way in (("func", ""), ("args", ".args"), ("keywords", ".keywords")):
            yield object.__getattribute__(value, name), way
    elif type(value) is FunctionType and is_the_users(value.__module__):
        read = {line.argval for line in get_instructions(value.__code__) if line.opname == "LOAD_GLOBAL"}
        found = {name: dict.get(value.__globals__, name) for name in sorted(read)}
        yield from ((held, f".{name}") for name, held in found.items() if issubclass(type(held), nn.Module))


def _place(root: Root, way: str = "") -> str:
    return root.place((root.path + way).removeprefix("."))


def _way(names: Names, entries: Sequence[Any], number: int) -> str:
    """Write the way from a holder to one of its entries."""
    if isinstance(names, tuple):
        return names[number]
    if names == NUMBERS:
        return f"[{number}]"
    key = entries[number % (len(entries) // 2)]
    # Others may not even be writable.
    if type(key) is str and len(key) < 40:
        return f".{key}" if names == ATTRIBUTES else f"[{key!r}]"
    return f"[{key}]" if type(key) is int and key.bit_length() < 64 else "[...]"
