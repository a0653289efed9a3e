"""Nested state taken apart into JSON and tensors, and put together again.

JSON lacks tuples, keys that are not strings, NaN and tensors. Each becomes an object with the key ``$``, which
says what it was; a dict of the user's that has this key is written as a list of pairs.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from kway.checkpoints.dtypes import STORED_DTYPES
from kway.errors import UsageError

_TAG = "$"
_DEEPEST = 100  # Python's JSON reader and writer recurse; a state of a training job is a handful deep
_PLAIN_INT_BITS = 1024  # longer ones go in base 16: Python limits how long a decimal number it reads
_ARRAY_TYPES = {
    name: np.dtype(name).type
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128",
    )
}  # fmt: skip
# MultiStepLR keeps its milestones in a Counter.
_PAIRS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_STORABLE = "None, bool, numbers, str, bytes, tensors, numpy arrays, and dicts, lists and tuples of them"


def flatten(state: Any, place: str = "state") -> tuple[Any, dict[str, torch.Tensor]]:
    """Take ``state`` apart into (JSON data, tensors by name); ``restore`` puts it together again.

    Dicts (with keys of any kind below), ``OrderedDict``, ``Counter``, lists, tuples, ``None``, bool, int, float (NaN
    and infinities too), complex, str, bytes, numpy numbers and arrays, and dense tensors of any dtype, shape and
    device, or sparse ones by coordinates. A tensor is named after its way from the root. It is not copied, and loses
    ``requires_grad``. Places that hold the same elements of the same memory share one tensor, and share it again when
    restored; other views of one memory are stored each for itself.

    Raises ``UsageError`` that names the place (``place['a'][0]``) of what cannot be stored.
    """
    taking = _Flattening()
    return taking.encode(state, place, ()), taking.tensors


def restore(encoded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put together what ``flatten`` took apart. The tensors given are those in the result.

    Raises ``UsageError`` where ``encoded`` is not what ``flatten`` gives, or a tensor is missing.
    """
    try:
        return _restore(encoded, tensors, {})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"a state that cannot be put together ({type(error).__name__}: {error})",
            "it must be JSON data and tensors as this version writes them",
        ) from None


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share when they are the same elements of the same memory."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if tensor.numel() == 0:
        return (id(tensor), shape, tensor.dtype)
    return (tensor.device, tensor.data_ptr(), shape, strides, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def check_storable(tensor: torch.Tensor, place: str) -> None:
    """Raise ``UsageError`` where ``tensor`` is no dense tensor with values of its own."""
    kind = type(tensor)
    fault = ""
    if kind not in {torch.Tensor, torch.nn.Parameter}:
        fault = f"a {kind.__module__}.{kind.__qualname__}"
    elif tensor.layout != torch.strided:
        fault = f"a tensor of layout {tensor.layout}"
    elif tensor.device.type == "meta":
        fault = "a tensor on the meta device, which holds no values"
    elif tensor.dtype not in STORED_DTYPES:
        fault = f"a tensor of {tensor.dtype}"
    if fault:
        raise UsageError(
            f"{place} is {fault}",
            "a checkpoint holds whole tensors, dense or by coordinates",
            "convert it before saving",
        )


class _Flattening:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._inside: set[int] = set()

    def encode(self, value: Any, place: str, way: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind in {bool, str}:
            return value
        if kind is int:
            return value if value.bit_length() <= _PLAIN_INT_BITS else {_TAG: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
        if kind is complex:
            return {
                _TAG: "complex",
                "parts": [self.encode(part, place, way) for part in (value.real, value.imag)],
            }
        if kind is bytes:
            return {_TAG: "bytes", "hex": value.hex()}
        if kind is torch.Tensor and value.layout == torch.sparse_coo:
            return self._sparse(value, place, way)
        if isinstance(value, torch.Tensor):
            check_storable(value, place)
            return {_TAG: "tensor", "name": self._name(value, way), **_strides(value)}
        if kind is np.ndarray and value.dtype.name in _ARRAY_TYPES and value.dtype.isnative:
            return {_TAG: "array", "name": self._name(torch.from_numpy(np.array(value, order="C")), way)}
        if isinstance(value, np.generic) and value.dtype.name in _ARRAY_TYPES:
            return {_TAG: "number", "dtype": value.dtype.name, "value": self.encode(value.item(), place, way)}
        if kind in {list, tuple, dict, OrderedDict, Counter}:
            return self._inner(value, place, way)
        raise UsageError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}", f"a checkpoint holds {_STORABLE}"
        )

    def _inner(self, value: Any, place: str, way: tuple[str, ...]) -> Any:
        if id(value) in self._inside:
            raise UsageError(f"{place} contains itself", "a checkpoint holds state without cycles")
        if len(way) >= _DEEPEST:
            raise UsageError(f"{place} lies {len(way)} levels deep", f"a checkpoint holds at most {_DEEPEST}")
        self._inside.add(id(value))
        encoded = self._container(value, place, way)
        self._inside.remove(id(value))
        return encoded

    def _container(self, value: Any, place: str, way: tuple[str, ...]) -> Any:
        def item(key: Any, inner: Any) -> Any:
            return self.encode(inner, f"{place}[{key!r}]", (*way, str(key)))

        kind = type(value)
        if kind is list:
            return [item(i, inner) for i, inner in enumerate(value)]
        if kind is tuple:
            return {_TAG: "tuple", "items": [item(i, inner) for i, inner in enumerate(value)]}
        if kind is dict and _TAG not in value and all(type(key) is str for key in value):
            return {key: item(key, inner) for key, inner in value.items()}
        pairs = [[self._key(key, place, way), item(key, inner)] for key, inner in value.items()]
        return {_TAG: _PAIRS[kind], "items": pairs}

    def _sparse(self, value: torch.Tensor, place: str, way: tuple[str, ...]) -> Any:
        # As it is: to add up entries of one place, or to leave some out, would round otherwise later.
        parts = {"indices": value._indices(), "values": value._values()}
        encoded = {name: self.encode(part, f"{place}.{name}", (*way, name)) for name, part in parts.items()}
        return {_TAG: "sparse", **encoded, "size": list(value.shape), "coalesced": value.is_coalesced()}

    def _key(self, key: Any, place: str, way: tuple[str, ...]) -> Any:
        before = len(self.tensors)
        encoded = self.encode(key, f"the key {key!r} of {place}", (*way, "key"))
        if len(self.tensors) > before:
            raise UsageError(
                f"{place} has a tensor as a key", "keys are numbers, strings, None or tuples of them"
            )
        return encoded

    def _name(self, tensor: torch.Tensor, way: Iterable[str]) -> str:
        key = identity(tensor)
        if key in self._names:
            return self._names[key]
        # A lone surrogate is a valid str, but no file format takes it.
        wanted = "/".join(way).encode("utf-8", "backslashreplace").decode() or "tensor"
        name, count = wanted, 1
        while name in self.tensors or name == "__metadata__":
            count += 1
            name = f"{wanted}~{count}"
        self.tensors[name] = tensor.detach()
        self._names[key] = name
        return name


def _strides(tensor: torch.Tensor) -> dict[str, list[int]]:
    """The order in memory, where it is not the usual one (channels last): kernels can depend on it."""
    if tensor.is_contiguous():
        return {}
    dense = torch.empty_like(tensor, device="meta")
    return {} if dense.is_contiguous() else {"strides": list(dense.stride())}


def _restore(value: Any, tensors: Mapping[str, torch.Tensor], placed: dict[str, torch.Tensor]) -> Any:
    def inner(item: Any) -> Any:
        return _restore(item, tensors, placed)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: inner(item) for key, item in value.items()}
    make: dict[str, Callable[[], Any]] = {
        "int": lambda: int(value["hex"], 16),
        "float": lambda: float(value["value"]),
        "complex": lambda: complex(*inner(value["parts"])),
        "bytes": lambda: bytes.fromhex(value["hex"]),
        "tuple": lambda: tuple(inner(value["items"])),
        "dict": lambda: {inner(key): inner(item) for key, item in value["items"]},
        "ordered": lambda: OrderedDict((inner(key), inner(item)) for key, item in value["items"]),
        "counter": lambda: Counter({inner(key): inner(item) for key, item in value["items"]}),
        "tensor": lambda: _placed(value, tensors, placed),
        "sparse": lambda: torch.sparse_coo_tensor(
            inner(value["indices"]),
            inner(value["values"]),
            value["size"],
            is_coalesced=value["coalesced"],
            check_invariants=True,
        ),
        "array": lambda: tensors[value["name"]].numpy().copy(),
        "number": lambda: _ARRAY_TYPES[value["dtype"]](inner(value["value"])),
    }
    return make[value[_TAG]]()


def _placed(
    value: dict[str, Any], tensors: Mapping[str, torch.Tensor], placed: dict[str, torch.Tensor]
) -> torch.Tensor:
    name = value["name"]
    if "strides" not in value:
        return tensors[name]
    if name not in placed:
        flat = tensors[name]
        placed[name] = torch.empty_strided(flat.shape, value["strides"], dtype=flat.dtype).copy_(flat)
    return placed[name]
