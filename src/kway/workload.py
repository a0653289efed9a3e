"""The record of what a model costs on one device: times by share size, bytes, layers; validated field by field."""

import math
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar

from kway.errors import UsageError
from kway.records import Record

# What is timed: the whole step as a run takes it, input included, and where they can be told apart its parts.
PARTS = ("step", "forward", "backward", "optimizer", "input")
BOUNDS = ("launch", "memory", "compute")
WHEN = ("forward", "backward", "step")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "broadcast")


@dataclass(frozen=True)
class Workload(Record):
    """What steps of a model cost on one device, by the share of a global batch that it takes. Seconds and bytes.

    ``batch_size``: the job's, global. ``samples``: of an epoch, or ``None``. ``sample_bytes``: input and target of a
    sample as they travel. ``flop_per_sample``: forward and backward, or ``None`` where they could not be counted.
    ``optimizer``: its class and the options that are switched on. ``level``: the exactness. ``made``: date.
    ``machine``: as in ``Training``.

    ``parameters``: ``count``, ``bytes``, ``trainable_count``, ``gradient_bytes``, ``optimizer_bytes`` (state after a
    real step), ``buffer_bytes``, ``tied`` (names of parameters that are another one under a second name), each tensor
    counted once. ``gradients``: elements by type of the numbers that devices add up. ``memory``: what stays for
    backward, ``activation_bytes_per_sample`` and ``activation_fixed_bytes``, with checkpointing
    ``checkpointed_activation_bytes_per_sample`` (or ``None``), ``workspace_bytes`` (most that a step takes beside), and
    ``peak``: ``step_kind``, ``devices`` (as one of so many, with its gradients in flat vectors where they are several),
    ``samples``, ``bytes`` of a whole step.

    ``timings``: one each with ``step_kind``, ``threads`` (of the host), ``devices`` (of so many it does what one does,
    but for what goes between them), ``samples`` (of the share), ``part`` (of ``PARTS``), ``seconds`` (the median),
    ``spread`` (of windows: half the distance of the quartiles over the median) and ``step_spread`` (of single steps:
    the standard deviation over the mean; ``None`` of parts, and where it is not known).
    ``step`` is a whole step as a run takes it, input included. ``fits``: ``step_kind``, ``threads``, ``several``
    (whether of one of several devices), ``part``, ``fixed_s``, ``per_sample_s`` (least squares of relative residuals,
    neither below 0) and ``error`` (the largest relative residual). ``layers``: one each with ``name``, ``type``,
    ``parameters``, ``parameter_bytes``, ``flop_per_sample``, ``activation_bytes_per_sample``, ``forward`` and
    ``backward`` (``fixed_s``, ``per_sample_s``), ``bound`` (of ``BOUNDS``) and ``why``. ``collectives``: what the level
    adds for several devices beside the gradients: ``when``, ``what``, ``bytes`` (that one device gives), ``times`` a
    step.
    ``buckets``: bytes of each call that brings gradients together, first first.
    ``step_kinds_left``: why, by kind that was not timed. ``draws_on_cpu``: whether a step draws random numbers there.
    ``busy``: what other programs kept busy meanwhile, like ``1.8 of 2 processors``, or ``""``.
    ``identity``: what tells the model from others of its name: ``parameters`` as it was built (``None``: its first run
    told) and ``code``, a digest of layers, shapes and code (``""``: not known).
    Raises ``UsageError`` for what is not of this form.
    """

    kind: ClassVar[str] = "workload"
    version: ClassVar[int] = 2

    model: str
    device: str
    device_name: str
    machine: dict[str, Any]
    versions: dict[str, str]
    precision: str
    level: str
    made: str
    batch_size: int
    samples: int | None
    sample_bytes: int
    flop_per_sample: float | None
    optimizer: str
    parameters: dict[str, Any]
    gradients: dict[str, int]
    memory: dict[str, Any]
    timings: list[dict[str, Any]]
    fits: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    buckets: list[int] = field(default_factory=list)
    step_kinds_left: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    notices: list[str] = field(default_factory=list)
    draws_on_cpu: bool = False
    busy: str = ""
    identity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = wrong_in_workload(self)
        if problem:
            raise UsageError(f"a {self.kind} record that does not hold together", problem)

    def step_kinds(self) -> list[str]:
        """Return the step kinds that were timed, in the order of the record."""
        return list(dict.fromkeys(timing["step_kind"] for timing in self.timings))

    def timed(
        self, step_kind: str, part: str = "step", threads: int | None = None, several: bool | None = None
    ) -> list[dict[str, Any]]:
        """Return the timings of a part, smaller shares first.

        ``threads``: only with so many; ``several``: only of one of several devices, or of one alone; where named.
        """
        found = [
            timing
            for timing in self.timings
            if (timing["step_kind"], timing["part"]) == (step_kind, part)
            and threads in (None, timing["threads"])
            and several in (None, timing["devices"] > 1)
        ]
        return sorted(found, key=lambda timing: (timing["samples"], timing["threads"], timing["devices"]))

    def fit(
        self, step_kind: str, part: str = "step", threads: int | None = None, several: bool | None = None
    ) -> dict[str, Any] | None:
        """Return the line through the timings of a part, as ``timed`` chooses them: the first, or ``None``."""
        for fitted in self.fits:
            same = (fitted["step_kind"], fitted["part"]) == (step_kind, part)
            if same and threads in (None, fitted["threads"]) and several in (None, fitted["several"]):
                return fitted
        return None


_NUMBER = int | float
_Form = dict[str, type | UnionType]

_FORMS: dict[str, _Form] = {
    "timings": {
        "step_kind": str, "threads": int, "devices": int, "samples": int, "part": str, "seconds": _NUMBER,
        "spread": _NUMBER, "step_spread": _NUMBER | None,
    },
    "fits": {
        "step_kind": str, "threads": int, "several": bool, "part": str, "fixed_s": _NUMBER, "per_sample_s": _NUMBER,
        "error": _NUMBER,
    },
    "layers": {
        "name": str, "type": str, "parameters": int, "parameter_bytes": int, "flop_per_sample": _NUMBER | None,
        "activation_bytes_per_sample": _NUMBER, "forward": dict, "backward": dict, "bound": str, "why": str,
    },
    "collectives": {"when": str, "what": str, "bytes": int, "times": int},
}  # fmt: skip
_PARAMETERS: _Form = {
    "count": int, "bytes": int, "trainable_count": int, "gradient_bytes": int, "optimizer_bytes": int,
    "buffer_bytes": int, "tied": list,
}  # fmt: skip
_MEMORY: _Form = {
    "activation_bytes_per_sample": _NUMBER, "activation_fixed_bytes": _NUMBER, "workspace_bytes": _NUMBER,
    "checkpointed_activation_bytes_per_sample": _NUMBER | None, "peak": list,
}  # fmt: skip
_PEAK: _Form = {"step_kind": str, "devices": int, "samples": int, "bytes": int}
_LINE: _Form = {"fixed_s": _NUMBER, "per_sample_s": _NUMBER}
_OWN: _Form = {
    "batch_size": int, "samples": int | None, "sample_bytes": int, "flop_per_sample": _NUMBER | None,
    "seconds": _NUMBER, "optimizer": str,
}  # fmt: skip
_IDENTITY: _Form = {"parameters": int | None, "code": str}
_CHOICES = {"part": PARTS, "bound": BOUNDS, "when": WHEN, "what": COLLECTIVES}
_AT_LEAST_ONE = ("samples", "threads", "devices", "batch_size", "times")


def wrong_in_workload(record: Workload) -> str:
    """Say what is wrong with a record, or ``""``."""
    problem = (
        _wrong({name: getattr(record, name) for name in _OWN}, _OWN)
        or _in("parameters", _wrong(record.parameters, _PARAMETERS))
        or _in("memory", _wrong(record.memory, _MEMORY))
        or _in("gradients", _wrong(record.gradients, dict.fromkeys(record.gradients, int)))
        or wrong_identity(record.identity)
        or _wrong_list("memory.peak", record.memory["peak"], _PEAK)
    )
    for name, form in _FORMS.items():
        problem = problem or _wrong_list(name, getattr(record, name), form)
    for place, layer in enumerate([] if problem else record.layers):
        for part in ("forward", "backward"):
            problem = problem or _in(f"layers[{place}].{part}", _wrong(layer[part], _LINE))
    return problem or _untimed(record)


def wrong_identity(identity: Any) -> str:
    """Say what is wrong with the ``identity`` of a record, or ``""``; older records have none."""
    return "" if identity == {} else _in("identity", _wrong(identity, _IDENTITY))


def _untimed(record: Workload) -> str:
    timed = {(each["step_kind"], each["threads"], each["part"]) for each in record.timings}
    for place, fitted in enumerate(record.fits):
        if (fitted["step_kind"], fitted["threads"], fitted["part"]) not in timed:
            return f"fits[{place}] is of what no timing is of"
    both = sorted({kind for kind, *_ in timed} & set(record.step_kinds_left))
    return f"{both[0]} is timed and left out" if both else ""


def _wrong_list(name: str, entries: Any, form: _Form) -> str:
    if not isinstance(entries, list):
        return f"{name} is a {type(entries).__name__}, not a list"
    found = (_in(f"{name}[{place}]", _wrong(entry, form)) for place, entry in enumerate(entries))
    return next((problem for problem in found if problem), "")


def _wrong(entry: Any, form: _Form) -> str:
    """Say which field of ``entry`` is not of ``form``, or ``""``: numbers are finite and not below 0."""
    if not isinstance(entry, dict):
        return f"it is a {type(entry).__name__}, not a table of fields"
    for name, kind in form.items():
        value = entry.get(name, ...)
        if value is ... or isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
            return f"{name} is {'missing' if value is ... else repr(value)}"
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            return f"{name} is {value!r}"
        if name in _AT_LEAST_ONE and value == 0:
            return f"{name} is 0"
        if name in _CHOICES and value not in _CHOICES[name]:
            return f"{name} is {value!r}, not one of {', '.join(_CHOICES[name])}"
    return ""


def _in(where: str, problem: str) -> str:
    return f"{where}: {problem}" if problem else ""
