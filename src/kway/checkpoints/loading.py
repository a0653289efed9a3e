"""Weights loaded by a model's own names, also where they come with the prefixes of wrappers."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from kway.checkpoints.names import PREFIXES, WRAPPERS, named_as_in, own_weights
from kway.errors import UsageError

# Names by their words: what begins with a word lies under it, and ``None`` leads to the name that ends there.
_Tree = dict[str | None, Any]
T = TypeVar("T")


def load_own_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], source: object) -> None:
    """Load tensors by their own names into a bare or wrapped model, each to where the model's tensor is.

    Prefixes that wrappers gave the names are passed over where these are then the model's. Other state that modules
    keep (get_extra_state) stays as it is. Raises ``UsageError`` where names or shapes differ, with the model unchanged.
    """
    check_names(model, weights, source)
    model.load_state_dict(named_as_in(model, _by_own_names(_own(model), weights)), strict=False)


def check_names(model: nn.Module, weights: Mapping[str, torch.Tensor], source: object) -> None:
    """Raise ``UsageError`` where names or shapes of ``weights`` are not those of ``model``."""
    unfit = misfit(model, weights)
    if unfit is not None:
        got, need, do = unfit
        raise UsageError(f"weights {source}: {got}", need, do)


def misfit(model: nn.Module, weights: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Say where names or shapes of ``weights`` are not the model's: what is there, is needed and is to be done."""
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            return (
                f"{name!r} is of type {type(value).__name__}",
                "weights are tensors by name",
                "leave it out",
            )
    own = _own(model)
    named = _by_own_names(own, weights)
    missing, extra = sorted(own.keys() - named.keys()), sorted(named.keys() - own.keys())
    if missing or extra:
        named = _bare(own, _with_tied(own, weights))
        missing, strange = sorted(own.keys() - named.keys()), sorted(named.keys() - own.keys())
        return (
            f"missing {_few(missing)}; not in the model {_few(strange)}{_prefixed(extra)}",
            f"they must have the model's {len(own)} names",
            "use the weights of this model, or the model that they are of"
            + (
                ""
                if missing
                else "; what it makes when it first runs comes with the module, or a file of kway's"
            ),
        )
    for name, value in own.items():
        if value.shape != named[name].shape:
            return (
                f"{name!r} has shape {tuple(named[name].shape)}",
                f"the model has {tuple(value.shape)}",
                "build the model with the sizes that the weights were trained with",
            )
    return None


def _own(model: nn.Module) -> dict[str, torch.Tensor]:
    return own_weights(model, model.state_dict())


def _by_own_names(
    own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return ``weights`` by the names ``own``, where these differ by prefixes of wrappers alone; else as they are."""
    weights = _with_tied(own, weights)
    if own.keys() == weights.keys():
        return dict(weights)
    keys = _matched(_tree(weights), _tree(own))
    return dict(weights) if keys is None else {name: weights[key] for name, key in keys.items()}


def _with_tied(
    own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return ``weights``, and under each name that the model has for the same tensor: files keep one of them."""
    missing = {name: value for name, value in own.items() if name not in weights and value.data_ptr()}
    if not missing:
        return weights
    there = {_place(own[name]): name for name in own.keys() & weights.keys()}
    twins = {name: there[_place(value)] for name, value in missing.items() if _place(value) in there}
    return {**weights, **{name: weights[twin] for name, twin in twins.items()}}


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _tree(names: Iterable[str]) -> _Tree:
    root: _Tree = {}
    for name in names:
        place = root
        for word in name.split("."):
            place = place.setdefault(word, {})
        place[None] = name
    return root


def _matched(theirs: _Tree, own: _Tree) -> dict[str, str] | None:
    """Return by each of the model's ``own`` names which of ``theirs`` is it, ``None`` where one is left over.

    A wrapper is a place under which there is nothing but the prefix. A module that is called like one is it where the
    model has it, too.
    """
    if theirs.keys() == own.keys():
        found: dict[str, str] = {own[None]: theirs[None]} if None in own else {}
        parts = [_matched(theirs[word], own[word]) for word in own if word is not None]
        if None not in parts:
            return found | {name: key for part in parts for name, key in (part or {}).items()}
    only = next(iter(theirs)) if len(theirs) == 1 else None
    return _matched(theirs[only], own) if only in PREFIXES else None


def _bare(own: Collection[str], weights: Mapping[str, T]) -> dict[str, T]:
    """Return what does not fit without the prefixes that all names have, so that what else differs can be told."""
    found = dict(weights)
    while not any(name in own for name in found):
        first = {name.partition(".")[0] for name in found}
        if len(first) != 1 or not first <= PREFIXES:
            break
        found = {name.partition(".")[2]: value for name, value in found.items()}
    return found


def _prefixed(names: Iterable[str]) -> str:
    """Name the prefixes of wrappers in names that are not the model's."""
    found = sorted({word for name in names for word in name.split(".")[:-1]} & PREFIXES)
    kinds = {
        word: sorted(path.rpartition(".")[2] for path in WRAPPERS if WRAPPERS[path] == word) for word in found
    }
    said = [f"{word + '.'!r} of {' and '.join(kind)}" for word, kind in kinds.items()]
    return f" (also without the prefix {' and '.join(said)})" if said else ""


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"
