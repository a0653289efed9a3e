"""Which of AMD's GPUs a program sees: ROCm's own rules, which are not CUDA's.

ROCm's lowest layer reads ``ROCR_VISIBLE_DEVICES``. HIP above it counts what that leaves anew, and reads
``HIP_VISIBLE_DEVICES``, or ``CUDA_VISIBLE_DEVICES`` where that one is not set at all. Both lists end at the first entry
that names no GPU. An entry that repeats another ends the first list too, and counts for nothing in the second.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kway.devices.visible import NAME, Visible

BELOW, HIP = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


def seen(environ: Mapping[str, str], gpus: Sequence[dict[str, Any]]) -> Visible:
    """Apply the variables to ``gpus``, the driver's list, of which each has ``uuid``."""
    below = _listed(BELOW, environ.get(BELOW), gpus)
    name = _above(environ)
    above = _listed(name, environ.get(name), [gpus[index] for index in below.physical])
    return Visible([below.physical[index] for index in above.physical], [*below.warnings, *above.warnings])


def hiding(environ: Mapping[str, str]) -> str:
    """Write down the variables that say which GPUs are seen, as they are set."""
    return " ".join(f"{name}={environ[name]}" for name in (BELOW, _above(environ)) if name in environ)


def _above(environ: Mapping[str, str]) -> str:
    return HIP if HIP in environ else NAME


def _listed(name: str, value: str | None, gpus: Sequence[dict[str, Any]]) -> Visible:
    if value is None:
        return Visible(list(range(len(gpus))), [])
    chosen: list[int] = []
    for word in value.split(","):
        found = _look_up(word, gpus, lowest=name == BELOW)
        repeats = found in chosen
        if repeats and name != BELOW:
            continue
        if found is None or repeats:
            why = "repeats a GPU" if repeats else f"names none of {len(gpus)} GPUs"
            text = f"{name}={value}: {word!r} {why}; ROCm ignores this entry and all after it"
            return Visible(chosen, [] if value.strip() in ("", "-1") else [text])
        chosen.append(found)
    return Visible(chosen, [])


def _look_up(word: str, gpus: Sequence[dict[str, Any]], lowest: bool) -> int | None:
    """Return the place of the GPU that an entry names. The lowest layer forgives spaces; HIP takes the first fit."""
    entry = word.strip() if lowest else word
    if entry.upper().startswith("GPU-"):
        fits = [i for i, gpu in enumerate(gpus) if str(gpu["uuid"]).upper().startswith(entry.upper())]
        return fits[0] if len(fits) == 1 or (fits and not lowest) else None
    if not (entry.isascii() and entry.isdigit()) or int(entry) >= len(gpus):
        return None
    return int(entry)
