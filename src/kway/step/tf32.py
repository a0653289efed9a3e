"""Whether float32 products and convolutions may be computed with fewer bits: TF32 on GPUs, bfloat16 on CPUs.

torch has two ways to say so, ``allow_tf32`` and ``fp32_precision``. Where a user took the second one, it refuses to
read the first; where it was said for all back ends at once, the first does not change what convolutions do.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Undo = Callable[[], None]
# What computes as many bits as float32 has: "none" where nothing was said, of this place or of all.
_WHOLE = ("ieee", "none")


def _places() -> list[Any]:
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    return [backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


def _read(ask: Callable[[], Any]) -> Any:
    """Return what torch says, ``None`` where it refuses to."""
    with suppress(RuntimeError):
        return ask()
    return None


def _state() -> tuple[Any, ...]:
    legacy = (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cudnn.allow_tf32,
    )
    return *(_read(ask) for ask in legacy), *(place.fp32_precision for place in _places())


# What is written together, by its places in a state: products, which the older way sets on CPUs as well; convolutions.
_PRODUCTS, _CONVOLUTIONS = (0, 1, 3, 6), (2, 4, 5)
_PARTS = (_PRODUCTS, _CONVOLUTIONS, (7,), (8,))
_LEGACY = 3


def kept() -> Undo:
    """Take note of what is allowed; return what puts it back, but for what torch refuses to tell."""
    before = _state()
    return lambda: _put_back(before)


def _put_back(state: tuple[Any, ...], written: Collection[tuple[int, ...]] = ()) -> None:
    """Put back the parts that are ``written`` or tell something else than in ``state``.

    The others are left alone: what torch begins with in cuDNN, TF32 unless all back ends are told otherwise, can be
    read, but not be set again once anything was.
    """
    now = _state()
    parts = [part for part in _PARTS if part in written or any(now[at] != state[at] for at in part)]
    precision, products, convolutions = state[:_LEGACY]
    # All of the older way first: it sets the newer one as well.
    if _PRODUCTS in parts and precision is not None:
        torch.set_float32_matmul_precision(precision)
    elif _PRODUCTS in parts and products is not None:
        torch.backends.cuda.matmul.allow_tf32 = products
    if _CONVOLUTIONS in parts and convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    places = _places()
    for at in (at for part in parts for at in part if at >= _LEGACY):
        # A place tells the same whether it was set or follows all back ends. It is left to follow wherever that gives
        # the value, so that what is said of all later holds here too.
        place = places[at - _LEGACY]
        place.fp32_precision = "none"
        if place.fp32_precision != state[at]:
            place.fp32_precision = state[at]


@contextmanager
def tf32(allowed: bool, device: torch.device | None = None) -> Iterator[None]:
    """Allow TF32 in products and convolutions on GPUs, or allow nothing but float32 anywhere, while open.

    What is so already is not written. ``device``: where it is computed; for a CPU nothing of cuDNN is.
    """
    before, written = _state(), set[tuple[int, ...]]()
    _, products, convolutions, *own = before
    try:
        if products is not allowed or (allowed and own[0] != "tf32"):
            written.add(_PRODUCTS)
            torch.backends.cuda.matmul.allow_tf32 = allowed
        # Torch's compiler reads the older way, also for a CPU.
        apart = device is not None and device.type == "cpu" and convolutions is not None
        if not apart and (convolutions is not allowed or (allowed and {*own[1:3]} != {"tf32"})):
            written.add(_CONVOLUTIONS)
            torch.backends.cudnn.allow_tf32 = allowed
        for at, place in enumerate(() if allowed else _places(), _LEGACY):
            part = next(part for part in _PARTS if at in part)
            if place.fp32_precision not in _WHOLE and not (apart and part is _CONVOLUTIONS):
                written.add(part)
                place.fp32_precision = "ieee"
        yield
    finally:
        # Also where it tells what it told before: what followed all back ends may be set now.
        _put_back(before, written)
