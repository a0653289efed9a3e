"""Device sets: from what a user writes to torch device strings, one a rank.

``auto``: every visible GPU, else ``cpu``. ``N``: the first N GPUs where any is visible, else N CPU ranks.
``cpu`` and ``cpu:N``: CPU ranks. ``cuda`` and ``cuda:I,J``: all GPUs, or these, as torch counts them. From Python
also a ``torch.device``, which is one rank, or a list of them.
"""

from collections.abc import Sequence
from typing import Any

from kway.devices.mps import NO_COLLECTIVES
from kway.errors import UsageError
from kway.records import Cluster

MOST_RANKS = 1024
FORMS = "a device set is auto, N, cpu, cpu:N, cuda or cuda:I,J"
SEVERAL = "several are separated by spaces, those without a colon also by commas: 1,2,3 or 'cpu:2 cuda:0,1'"


def parse(spec: Any, cluster: Cluster) -> list[str]:
    """Return the torch device strings of a device set, one a rank.

    Raises ``UsageError`` for what is no device set, MPS, a count below 1, a GPU that is not there or is listed
    twice, and more GPUs than are visible.
    """
    text = _text(spec)
    kind, colon, rest = text.partition(":")
    if text == "auto":
        return _all_gpus(cluster) or ["cpu"]
    if kind == "cpu":
        return ["cpu"] * (_count(text, rest) if colon else 1)
    if kind == "mps":
        raise UsageError(f"device set {text!r}", NO_COLLECTIVES, "use --devices cpu:N")
    if kind == "cuda":
        _need_gpus(text, 1, cluster)
        return _listed(text, rest, cluster) if colon else _all_gpus(cluster)
    count = _count(text, text)
    if not cluster.gpus:
        return ["cpu"] * count
    _need_gpus(text, count, cluster)
    return _all_gpus(cluster)[:count]


def spelled(spec: Any) -> Any:
    """Return a ``torch.device``, or a list of them, as the text of a device set, and anything else as it is.

    ``torch.device("cuda")`` is one GPU, the first. Raises ``UsageError`` for devices of two kinds, and of others.
    """
    devices = spec if isinstance(spec, list | tuple) else [spec]
    # Known by their looks: this part of kway does not load torch.
    if not devices or not all(_is_of_torch(device) for device in devices):
        return spec
    kinds = {str(device.type) for device in devices}
    if kinds == {"cpu"}:
        return f"cpu:{len(devices)}"
    if kinds == {"mps"}:
        return "mps"
    if kinds == {"cuda"}:
        return f"cuda:{','.join(str(device.index or 0) for device in devices)}"
    raise UsageError(f"device set {spec!r}", FORMS, "name CPU ranks only, or GPUs of CUDA only")


def _is_of_torch(device: Any) -> bool:
    kind = type(device)
    return (kind.__module__, kind.__name__) == ("torch", "device")


def parse_list(text: Any, cluster: Cluster) -> list[list[str]]:
    """Return several device sets: separated by spaces, where no colon is in them also by commas, or as a sequence.

    Raises ``UsageError`` as ``parse`` does, and for an empty list.
    """
    entries: list[Any] = []
    named = spelled(text)
    for part in [named] if isinstance(named, str | int) or not isinstance(named, Sequence) else named:
        entries += _split(part) if isinstance(part, str) else [part]
    if not entries:
        raise UsageError("no device set", FORMS, SEVERAL)
    try:
        return [parse(entry, cluster) for entry in entries]
    except UsageError as error:
        if error.need != FORMS:
            raise
        raise UsageError(error.got, FORMS, SEVERAL) from None


def warnings(devices: Sequence[str], cluster: Cluster, cores: int = 0) -> list[str]:
    """Return lines about a set that works, but not well: more CPU ranks than usable cores.

    ``cores``: how many these ranks share, where this process, one of them, is bound to a part (0: it is not).
    """
    ranks = sum(device == "cpu" for device in devices)
    usable: int = cores or cluster.cpu["usable"]
    if ranks <= usable:
        return []
    shared = "1 usable core" if usable == 1 else f"{usable} usable cores"
    return [f"{ranks} CPU ranks share {shared}: the result is the same, the time is longer"]


def _text(spec: Any) -> str:
    spec = spelled(spec)
    # True is an int to Python, but no number of devices to anybody.
    if isinstance(spec, bool) or not isinstance(spec, str | int):
        raise UsageError(f"device set {spec!r}", FORMS)
    return str(spec).strip()


def _split(text: str) -> list[str]:
    entries = []
    for word in text.split():
        # The commas of cuda:0,1 belong to one set.
        entries += [word] if ":" in word else word.split(",")
    return entries


def _is_integer(text: str) -> bool:
    digits = text[1:] if text[:1] in ("-", "+") else text
    return digits.isascii() and digits.isdigit()


def _count(text: str, digits: str) -> int:
    if not _is_integer(digits):
        raise UsageError(f"device set {text!r}", FORMS)
    if int(digits) < 1:
        raise UsageError(f"device set {text!r} asks for {int(digits)} devices", "at least 1 is needed")
    if int(digits) > MOST_RANKS:
        raise UsageError(
            f"device set {text!r} asks for {int(digits)} devices",
            f"one machine runs at most {MOST_RANKS} ranks",
        )
    return int(digits)


def _all_gpus(cluster: Cluster) -> list[str]:
    return [f"cuda:{gpu['index']}" for gpu in cluster.gpus]


def _shown(cluster: Cluster) -> str:
    names = _all_gpus(cluster)
    return f"{len(names)} ({', '.join(names)})" if names else "no GPU"


def _need_gpus(text: str, count: int, cluster: Cluster) -> None:
    available = len(cluster.gpus)
    if available == 0:
        why = cluster.backends["cuda"]["why"]
        raise UsageError(
            f"device set {text!r} needs a GPU", f"no GPU can be used ({why})", "use --devices cpu:N"
        )
    if count > available:
        raise UsageError(
            f"device set {text!r} needs {count} devices, this machine shows {_shown(cluster)}",
            f"use --devices {available}, or cpu:{count} for CPU ranks, or join more machines with torchrun",
        )


def _listed(text: str, rest: str, cluster: Cluster) -> list[str]:
    chosen: list[int] = []
    for part in rest.split(","):
        if not (part.isascii() and part.isdigit()):
            raise UsageError(
                f"device set {text!r}: {part!r} is not the index of a GPU",
                "indices are whole numbers with commas between, as in cuda:0,1",
                f"this machine shows {_shown(cluster)}",
            )
        index = int(part)
        if index in chosen:
            raise UsageError(f"device set {text!r} lists cuda:{index} twice", "each rank needs its own GPU")
        if index >= len(cluster.gpus):
            raise UsageError(
                f"device set {text!r}: there is no cuda:{index}", f"this machine shows {_shown(cluster)}"
            )
        chosen.append(index)
    return [f"cuda:{index}" for index in chosen]
