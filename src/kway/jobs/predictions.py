"""What a model returned for each batch, as one: in the order of the data set, one row a sample."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kway.errors import UsageError

# Data set indices, and what the model returned for them.
Piece = tuple[Any, Any]


def alike(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield ``pieces``. Raises ``UsageError`` at the first whose outputs are no rows of its samples, or have another
    shape a sample than before.
    """
    first: dict[str, tuple[int, ...]] | None = None
    for indices, output in pieces:
        found = dict(_shapes(output))
        first = found if first is None else first
        if first.keys() != found.keys():
            raise UsageError(
                f"the model returned {_names(first)} for one batch, {_names(found)} for another",
                "every batch must give the same outputs",
            )
        for name, shape in found.items():
            if not shape or shape[0] != len(indices):
                raise UsageError(
                    f"{name} has shape {shape} for {len(indices)} samples",
                    "the first dimension must be the samples",
                )
            if shape[1:] != first[name][1:]:
                raise UsageError(
                    f"{name} has shape {first[name]} for one batch, {shape} for another",
                    "predictions are put together, so all samples must have one shape",
                    "pad them to a fixed length, or return one row a sample",
                )
        yield indices, output


def merged(pieces: list[Piece]) -> Any:
    """Return one output of the structure of each, on all samples. Raises ``UsageError`` where there is none."""
    order = torch.argsort(torch.cat([torch.as_tensor(indices) for indices, _ in pieces]))
    outputs = [output for _, output in alike(pieces)]
    return _merged(outputs, order)


def _shapes(output: Any, name: str = "the output") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every tensor inside."""
    if isinstance(output, torch.Tensor):
        yield name, tuple(output.shape)
    elif isinstance(output, Mapping):
        for key, part in output.items():
            yield from _shapes(part, f"{name}[{key!r}]")
    elif isinstance(output, tuple | list):
        for place, part in enumerate(output):
            yield from _shapes(part, f"{name}[{place}]")
    elif is_dataclass(output) and not isinstance(output, type):
        for key in _names_of(output):
            yield from _shapes(getattr(output, key), f"{name}.{key}")


def _names(shapes: Mapping[str, Any]) -> str:
    return ", ".join(shapes) or "no tensor"


def _names_of(value: Any) -> list[str]:
    """List the fields that a dataclass has, also those that it computes."""
    return [field.name for field in fields(value) if hasattr(value, field.name)]


def _merged(pieces: list[Any], order: torch.Tensor) -> Any:
    first = pieces[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(pieces)[order]
    if isinstance(first, Mapping):
        return {key: _merged([piece[key] for piece in pieces], order) for key in first}
    if isinstance(first, tuple | list):
        columns = [_merged([piece[at] for piece in pieces], order) for at in range(len(first))]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if is_dataclass(first) and not isinstance(first, type):
        parts = {key: [getattr(piece, key) for piece in pieces] for key in _names_of(first)}
        # Not made anew, which would compute once more what the class computes from its fields.
        whole = copy.copy(first)
        for key, held in parts.items():
            object.__setattr__(whole, key, _merged(held, order))
        return whole
    if first is None:
        return None
    raise UsageError(
        f"a prediction of type {type(first).__name__}",
        "a model that predicts must return tensors, or tuples, lists, dicts and dataclasses of them",
        "let the model return one of these, or predict with a module around it that does",
    )
