"""A number that stands for samples: ranks compare it to see that they read the same."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

# Of an array, this many elements spread over it enter with their places.
_EXCERPT = 64


def digest_of(value: Any) -> int:
    """Return 63 bits that depend on the kind, the shape and the contents of ``value``: on an excerpt element by
    element, on the rest by parity and sum.

    ``value``: arrays, tensors, numbers and text, in nested lists, tuples, dicts and dataclasses; flat lists of
    numbers enter with every element. Of an object of any other kind, only its kind and what it shows as an
    array enter.
    """
    found = blake2b(digest_size=8)
    _feed(found, value)
    return int.from_bytes(found.digest(), "little") >> 1


def _feed(found: Any, value: Any) -> None:
    found.update(f"{type(value).__name__}:".encode())
    if value is None or isinstance(value, bool | int | float | complex):
        found.update(repr(value).encode())
    elif isinstance(value, str):
        found.update(value.encode(errors="surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        found.update(value)
    elif isinstance(value, torch.Tensor):
        _feed_tensor(found, value)
    elif isinstance(value, np.ndarray | np.generic):
        _feed_array(found, np.asarray(value))
    elif isinstance(value, Mapping):
        found.update(f"{len(value)};".encode())
        for name, item in value.items():
            _feed(found, name)
            _feed(found, item)
    elif isinstance(value, list | tuple):
        _feed_items(found, value)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            # One that the class computes may not be there yet.
            if hasattr(value, field.name):
                _feed(found, getattr(value, field.name))
    elif hasattr(value, "__array_interface__"):  # pictures, for example
        _feed_array(found, np.asarray(value))
    found.update(b"|")


def _feed_items(found: Any, items: Any) -> None:
    found.update(f"{len(items)};".encode())
    if len(items) and all(type(item) is int for item in items):
        found.update(repr(items).encode())
        return
    for item in items:
        _feed(found, item)


def _feed_tensor(found: Any, value: torch.Tensor) -> None:
    found.update(f"{value.dtype}{tuple(value.shape)}".encode())
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        return
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    excerpt = flat[:: max(1, flat.numel() // _EXCERPT)].contiguous().cpu()
    found.update(excerpt.view(torch.uint8).numpy().tobytes() if excerpt.numel() else b"")
    if flat.numel() and flat.device.type == "cpu":
        _feed_whole(found, flat.contiguous().view(torch.uint8).numpy())


def _feed_array(found: Any, value: Any) -> None:
    found.update(f"{value.dtype}{value.shape}".encode())
    excerpt = value.reshape(-1)[:: max(1, value.size // _EXCERPT)]
    # The bytes of an array of objects are addresses, which no two processes share.
    if value.dtype.hasobject:
        found.update(repr(excerpt.tolist()).encode())
        return
    found.update(excerpt.tobytes())
    if value.size:
        _feed_whole(found, np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _feed_whole(found: Any, raw: Any) -> None:
    """Enter a parity and a sum of all bytes, eight at a time: a difference anywhere shows, at memory's speed."""
    words = raw[: len(raw) // 8 * 8]
    if words.ctypes.data % 8:
        words = words.copy()
    words = words.view(np.uint64)
    found.update(np.bitwise_xor.reduce(words).tobytes())
    found.update(np.add.reduce(words).tobytes())
    found.update(raw[len(raw) // 8 * 8 :].tobytes())
