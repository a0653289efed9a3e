"""Whether float32 products and convolutions may be computed with fewer bits: TF32 on GPUs, bfloat16 on CPUs.

torch has two ways to say so, ``allow_tf32`` and ``fp32_precision``. Where a user took the second one, it refuses to
read the first; where it was said for all back ends at once, the first does not change what convolutions do.
"""

from collections.abc import Callable, Iterator
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


def kept() -> Undo:
    """Take note of what is allowed; return what puts it back, but for what torch refuses to tell."""
    before = _state()

    def put_back() -> None:
        if _state() != before:
            _put_back(before)

    return put_back


def _put_back(state: tuple[Any, ...]) -> None:
    precision, products, convolutions, *own = state
    # All of the older way first: it sets the newer one as well.
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    elif products is not None:
        torch.backends.cuda.matmul.allow_tf32 = products
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    for place, value in zip(_places(), own, strict=True):
        # A place tells the same whether it was set or follows all back ends. It is left to follow wherever that gives
        # the value, so that what is said of all later holds here too.
        place.fp32_precision = "none"
        if place.fp32_precision != value:
            place.fp32_precision = value


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 in products and convolutions on GPUs, or allow nothing but float32 anywhere, while open."""
    before = _state()
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        for place in () if allowed else _places():
            if place.fp32_precision not in _WHOLE:
                place.fp32_precision = "ieee"
        yield
    finally:
        # Also where it tells what it told before: what followed all back ends may be set now.
        _put_back(before)
