"""What a model returned for each batch, as one: in the order of the data set, one row a sample."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from kway.data.structure import attributes_of
from kway.errors import UsageError

_ALIKE = "every batch must give the same outputs"
# Data set indices, and what the model returned for them.
Piece = tuple[Any, Any]


def alike(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield ``pieces``. Raises ``UsageError`` at the first whose outputs are not dense, are no rows of its samples, or
    have another shape a sample than before.
    """
    first: dict[str, tuple[int, ...]] | None = None
    for indices, output in pieces:
        found = dict(_shapes(output))
        first = found if first is None else first
        if first.keys() != found.keys():
            raise UsageError(
                f"the model returned {_names(first)} for one batch, {_names(found)} for another",
                _ALIKE,
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
    """Return one output of the structure of each, on all samples. Raises ``UsageError`` where there is none.

    What a dataclass computes or holds beside its fields may be no row a sample, but must be equal in all pieces then.
    """
    outputs = [output for _, output in alike(pieces)]
    order = torch.argsort(torch.cat([torch.as_tensor(indices) for indices, _ in pieces]))
    return _merged(outputs, _Rows([len(indices) for indices, _ in pieces], order), "the output", False)


@dataclass(frozen=True)
class _Rows:
    """How many samples each piece has, and in which order their rows are those of the data set."""

    counts: list[int]
    order: torch.Tensor


def _shapes(output: Any, name: str = "the output") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of every tensor inside, but those that a dataclass computes.

    Raises ``UsageError`` for one that is sparse or nested: torch joins no rows of these.
    """
    if isinstance(output, torch.Tensor):
        if output.layout is not torch.strided or output.is_nested:
            nested = "nested, " if output.is_nested else ""
            raise UsageError(
                f"{name} is a {type(output).__name__} that is not dense ({nested}layout {output.layout})",
                "predictions are put together, row by row",
                "return a dense tensor: "
                + (".to_padded_tensor(...)" if output.is_nested else ".to_dense()")
                + ", in the model or in a module around it that predicts",
            )
        yield name, tuple(output.shape)
    for end, (part, computed) in (_parts(output) or {}).items():
        if not computed:
            yield from _shapes(part, name + end)


def _names(shapes: Mapping[str, Any]) -> str:
    return ", ".join(shapes) or "no tensor"


def _parts(value: Any) -> dict[str, tuple[Any, bool]] | None:
    """Return what a container holds, by what names it there, and whether that is computed; ``None``: it is none."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": (part, False) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return {f"[{place}]": (part, False) for place, part in enumerate(value)}
    if is_dataclass(value) and not isinstance(value, type):
        given = _fields_of(value)
        return {f".{name}": (part, name not in given) for name, part in attributes_of(value).items()}
    return None


def _fields_of(value: Any) -> set[str]:
    """List the fields with which a dataclass is made, and not those that it computes."""
    return {field.name for field in fields(value) if field.init}


def _merged(pieces: list[Any], rows: _Rows, name: str, computed: bool) -> Any:
    """``computed``: whether ``name`` is computed by a dataclass, or lies in something that is."""
    first = pieces[0]
    parts = [_parts(piece) for piece in pieces]
    if parts[0] is None:
        return _leaf(pieces, rows, name, computed)
    if any(held is None or held.keys() != parts[0].keys() for held in parts):
        raise UsageError(f"{name} holds other parts for one batch than for another", _ALIKE)
    whole = {
        end: _merged([held[end][0] for held in parts if held], rows, name + end, computed or own)
        for end, (_, own) in parts[0].items()
    }
    if isinstance(first, Mapping):
        return dict(zip(first, whole.values(), strict=True))
    if isinstance(first, tuple | list):
        return type(first)(*whole.values()) if hasattr(first, "_fields") else type(first)(whole.values())
    # Not made anew, which would compute once more what the class computes from its fields.
    made = copy.copy(first)
    for end, part in whole.items():
        object.__setattr__(made, end.removeprefix("."), part)
    return made


def _leaf(pieces: list[Any], rows: _Rows, name: str, computed: bool) -> Any:
    first = pieces[0]
    if all(isinstance(piece, torch.Tensor) for piece in pieces) and (not computed or _are_rows(pieces, rows)):
        return torch.cat(pieces)[rows.order]
    if (computed or first is None) and all(_equal(first, piece) for piece in pieces[1:]):
        return first
    if computed:
        raise UsageError(
            f"{name}, of type {type(first).__name__}, is no row a sample, and differs between batches",
            "what a dataclass computes must be rows of samples, or the same for every batch",
            "let the model return the parts from which it is computed",
        )
    if first is None:
        raise UsageError(f"{name} is None for one batch, and not for another", _ALIKE)
    raise UsageError(
        f"a prediction of type {type(first).__name__}",
        "a model that predicts must return tensors, or tuples, lists, dicts and dataclasses of them",
        "let the model return one of these, or predict with a module around it that does",
    )


def _are_rows(pieces: list[torch.Tensor], rows: _Rows) -> bool:
    shapes = [tuple(piece.shape) for piece in pieces]
    return [shape[:1] for shape in shapes] == [(count,) for count in rows.counts] and (
        len({shape[1:] for shape in shapes}) == 1
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        # Arrays have no one answer.
        return False
