"""An optimizer's state by the names of its parameters.

``torch.optim.Optimizer.state_dict`` numbers them, so that another order gives momentum to the wrong tensor without
a word where shapes agree.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from kway.errors import UsageError

# How an optimizer computes its step on this device, which is not part of what it computes.
IMPLEMENTATION = frozenset({"capturable", "differentiable", "foreach", "fused"})
_Named = Iterable[tuple[str, torch.Tensor]]


def state_by_name(optimizer: Optimizer, named: _Named) -> dict[str, Any]:
    """Return the optimizer's state: ``kind``, ``groups`` (options and the ``names`` in each), ``entries`` by name.

    ``named``: the model's parameters, as ``named_parameters()`` gives them. Tensors are the optimizer's own, not
    copies; nothing in the optimizer changes, also before its first step. Raises ``UsageError`` where the optimizer
    holds a parameter that ``named`` lacks.
    """
    groups = _groups(optimizer, named)
    return {
        "kind": type(optimizer).__name__,
        "groups": [{**_options(group), "names": [name for name, _ in pairs]} for group, pairs in groups],
        "entries": {
            name: dict(optimizer.state[parameter])
            for _, pairs in groups
            for name, parameter in pairs
            if parameter in optimizer.state
        },
    }


def options_by_name(optimizer: Optimizer, named: _Named) -> list[dict[str, str]]:
    """Return the options of each group as texts, ``names`` of parameters among them. Raises as ``state_by_name``."""
    return [
        {name: str(value) for name, value in {**_options(group), "names": [n for n, _ in pairs]}.items()}
        for group, pairs in _groups(optimizer, named)
    ]


def load_by_name(optimizer: Optimizer, named: _Named, saved: Mapping[str, Any]) -> None:
    """Give ``optimizer`` the state that ``state_by_name`` returned, whatever the order of its parameters and groups.

    Entries keep their dtype and move to their parameter's device; no memory is shared with ``saved``. Options that
    ``saved`` lacks stay as they are, and so do those that say how a device computes. Raises ``UsageError`` that lists
    what differs, with the optimizer unchanged: its kind, names that are missing or new, or parameters that are
    grouped otherwise.
    """
    groups = _groups(optimizer, named)
    _check(type(optimizer).__name__, groups, saved)
    by_names = {frozenset(group["names"]): group for group in saved["groups"]}
    parameters: dict[int, tuple[str, torch.Tensor]] = {}
    layouts = []
    for group, pairs in groups:
        saved_options = by_names[frozenset(n for n, _ in pairs)].items()
        options = {key: value for key, value in saved_options if key != "names" and key not in IMPLEMENTATION}
        first = len(parameters)
        numbers = range(first, first + len(pairs))
        layouts.append({**_options(group), **_copied(options), "params": list(numbers)})
        parameters.update(zip(numbers, pairs, strict=True))
    entries = {
        number: _copied(saved["entries"][name])
        for number, (name, _) in parameters.items()
        if name in saved["entries"]
    }
    own_names = [group.get("param_names") for group, _ in groups]
    for layout, names in zip(layouts, own_names, strict=True):
        if names is not None:
            layout["param_names"] = names
    optimizer.load_state_dict({"state": entries, "param_groups": layouts})
    # torch casts entries to their parameter's dtype: averages kept in float32 for bfloat16 weights would lose bits.
    for number, entry in entries.items():
        held = optimizer.state[parameters[number][1]]
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)


def _groups(
    optimizer: Optimizer, named: _Named
) -> list[tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]]:
    names = {id(parameter): name for name, parameter in named}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise UsageError(
                    f"parameter {position} of the optimizer's group {index} (shape {tuple(parameter.shape)})",
                    "its state is saved by name, and the model has no such parameter",
                )
        groups.append((group, [(names[id(parameter)], parameter) for parameter in group["params"]]))
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in {"params", "param_names"}}


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


def _check(
    kind: str, groups: list[tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]], saved: Mapping[str, Any]
) -> None:
    own = [{name for name, _ in pairs} for _, pairs in groups]
    theirs = [set(group["names"]) for group in saved["groups"]]
    here, there = set().union(*own), set().union(*theirs)
    differences = []
    if kind != saved["kind"]:
        differences.append(f"it is of {saved['kind']}, the job has {kind}")
    if there - here:
        differences.append(f"the job does not optimize {', '.join(sorted(there - here))}")
    if here - there:
        differences.append(f"it has nothing for {', '.join(sorted(here - there))}")
    if here == there and sorted(map(sorted, own)) != sorted(map(sorted, theirs)):
        differences.append(f"its groups are {_listed(theirs)}, the job's {_listed(own)}")
    if differences:
        raise UsageError(f"an optimizer state that does not fit: {'; '.join(differences)}")


def _listed(groups: list[set[str]]) -> str:
    return " and ".join(f"({', '.join(sorted(group))})" for group in groups)
