"""What ``CUDA_VISIBLE_DEVICES`` means: which of the driver's GPUs a program sees, in which order.

The rules are CUDA's own, not an interpretation that would be kinder: the list ends at the first entry that
names no GPU, and an entry that repeats another hides every GPU. Both are silent in CUDA, so here they warn.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

NAME = "CUDA_VISIBLE_DEVICES"


class Visible(NamedTuple):
    """``physical``: the driver's index of each visible GPU, in torch's order. ``warnings``: for the user."""

    physical: list[int]
    warnings: list[str]


def visible(value: str | None, gpus: Sequence[dict[str, Any]], order: str | None = None) -> Visible:
    """Apply ``CUDA_VISIBLE_DEVICES`` (``value``) and ``CUDA_DEVICE_ORDER`` (``order``); ``None`` means unset.

    ``gpus`` is the driver's list, by PCI bus: each has ``uuid``, ``name`` and, where the GPU is divided,
    ``mig``, the UUIDs of its instances.
    """
    warnings = _order_warnings(order, gpus, value)
    if value is None:
        return Visible(list(range(len(gpus))), warnings)
    chosen: list[int] = []
    seen: set[tuple[int, str]] = set()
    for entry in (part.strip() for part in value.split(",")):
        found = _look_up(entry, gpus)
        if isinstance(found, str):
            if value.strip() not in ("", "-1"):
                warnings.append(f"{NAME}={value}: {found}; CUDA ignores this entry and all after it")
            break
        instance = entry if entry.startswith("MIG-") else ""
        if (found, instance) in seen:
            warnings.append(f"{NAME}={value}: {entry} repeats a GPU, and CUDA then shows none at all")
            return Visible([], warnings)
        seen.add((found, instance))
        if instance and chosen:
            warnings.append(f"{NAME}={value}: CUDA uses one MIG instance a process, the first")
            break
        chosen.append(found)
    return Visible(chosen, warnings)


def _look_up(entry: str, gpus: Sequence[dict[str, Any]]) -> int | str:
    """Return the driver's index of the GPU that ``entry`` names, or the reason why there is none."""
    if entry.startswith("GPU-"):
        matches = [i for i, gpu in enumerate(gpus) if str(gpu.get("uuid") or "").startswith(entry)]
        if len(matches) == 1:
            return matches[0]
        return f"{entry} fits {len(matches)} GPUs" if matches else f"no GPU has the UUID {entry}"
    if entry.startswith("MIG-"):
        # Old drivers write MIG-GPU-UUID/INSTANCE/SLICE, which names its GPU; new ones give each its own UUID.
        parent = entry.removeprefix("MIG-").split("/")[0]
        for i, gpu in enumerate(gpus):
            if entry in gpu.get("mig", ()) or (parent and gpu.get("uuid") == parent):
                return i
        return f"no MIG instance {entry} is known to the driver"
    number = _leading_integer(entry)
    if number is None:
        return f"{entry!r} is neither an index nor a UUID"
    if 0 <= number < len(gpus):
        return number
    count = f"{len(gpus)} GPU" + ("s" if len(gpus) != 1 else "")
    return f"there is no GPU {number}, the driver has {count}"


def _leading_integer(text: str) -> int | None:
    """Read the integer that ``text`` starts with: CUDA takes ``1x`` for 1."""
    end = 1 if text[:1] in ("+", "-") else 0
    start = end
    while end < len(text) and text[end] in "0123456789":
        end += 1
    return int(text[:end]) if end > start else None


def _order_warnings(order: str | None, gpus: Sequence[dict[str, Any]], value: str | None) -> list[str]:
    models = {gpu.get("name") for gpu in gpus}
    by_uuid = value is not None and value.startswith(("GPU-", "MIG-"))
    if len(models) < 2 or by_uuid or (order or "").strip() == "PCI_BUS_ID":
        return []
    return [
        "GPUs of different models: CUDA counts the fastest first, the driver by PCI bus, so the indices "
        "shown here may name other cards; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    ]
