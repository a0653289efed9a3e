"""What kway will not do though others do, by the names under which it is asked for, each with the reason.

docs/decisions/0030 to 0032 say more.
"""

import re

_AVERAGED = (
    "kway refuses it: devices that average their weights now and then take steps that one device does not take, so no "
    "level of exactness holds",
    "use data, whose steps are those of one device, with a larger batch for fewer of them",
)
_COMPRESSED = (
    "kway refuses it: what devices send each other would be changed, so that the result depends on how many there are, "
    "and no level of exactness holds",
    "use a larger batch, so that gradients are summed less often",
)
_FP8 = (
    "kway refuses it: with two or three bits of mantissa a proof cannot tell a fault from rounding",
    "use bf16 or tf32",
)
# Of which kinds, by which names. What a name of another kind means is not known here.
_BY_KIND = (
    (
        ("strategy", "optimizer"),
        ("fedavg", "federated", "federatedaveraging", "localsgd", "diloco"),
        _AVERAGED,
    ),
    (
        ("strategy", "optimizer", "setting", "precision"),
        ("powersgd", "compression", "gradientcompression", "compress", "onebitadam", "topk"),
        _COMPRESSED,
    ),
    (
        ("precision", "setting"),
        ("fp8", "float8", "mxfp8", "fp8e4m3", "fp8e5m2", "float8e4m3fn", "float8e5m2"),
        _FP8,
    ),
)


def reason(kind: str, name: str) -> tuple[str, str] | None:
    """Return need and do of the error for a name of a kind that is refused, ``None`` for any other name."""
    plain = re.sub(r"[-_ ]|=.*", "", name.lower())
    return next((why for kinds, names, why in _BY_KIND if kind in kinds and plain in names), None)
