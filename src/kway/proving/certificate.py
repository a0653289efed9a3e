"""What a proof of bits leaves behind: fingerprints of every step, to be checked on another machine."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("loss", "gradient", "parameters", "buffers", "optimizer")


def fingerprints(digests: Sequence[Mapping[str, str]], buffers: set[str]) -> list[dict[str, str]]:
    """Fold the SHA-256 of each tensor of each step into one for each kind of tensor.

    ``digests``: by step, of tensors called ``loss``, ``gradient/NAME``, ``model/NAME``, ``optimizer/NAME/ENTRY``
    and, where the job keeps a moving average of the weights, ``average/NAME``; ``buffers``: which of the model's
    names are buffers.
    """
    steps = []
    for tensors in digests:
        folded = {kind: hashlib.sha256() for kind in KINDS}
        for name in sorted(tensors):
            digest = folded.setdefault(_kind(name, buffers), hashlib.sha256())
            digest.update(f"{name} {tensors[name]}\n".encode())
        steps.append({kind: digest.hexdigest() for kind, digest in folded.items()})
    return steps


def _kind(name: str, buffers: set[str]) -> str:
    kind, _, rest = name.partition("/")
    if kind != "model":
        return kind
    return "buffers" if rest in buffers else "parameters"


def first_disagreement(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Compare two certificates; return what differs first in words, or ``None``.

    What the bits hold within comes first: where it differs, no promise was broken.
    """
    for name in {**own["holds_within"], **other["holds_within"]}:
        here, there = own["holds_within"].get(name), other["holds_within"].get(name)
        if here != there:
            return (
                f"another kind of machine: {name} is {here!r} here and {there!r} there, bits are not promised"
            )
    for name in ("model", "batch_size", "precision", "seed"):
        if own[name] != other[name]:
            return f"another job: {name} is {own[name]!r} here and {other[name]!r} there"
    if len(own["steps"]) != len(other["steps"]):
        return f"another job: {len(own['steps'])} steps here and {len(other['steps'])} there"
    for step, (here, there) in enumerate(zip(own["steps"], other["steps"], strict=True), 1):
        for kind in {**here, **there}:
            if here.get(kind) != there.get(kind):
                return f"{kind} of step {step} differ"
    return None
