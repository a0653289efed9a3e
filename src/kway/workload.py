"""The record of what a model costs on one device: times by share size, bytes, layers; validated field by field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kway.errors import UsageError
from kway.forms import AtLeast, Maybe, OneOf
from kway.records import Record

# What is timed: the whole step as a run takes it, input included, and where they can be told apart its parts.
PARTS = ("step", "forward", "backward", "optimizer", "input")
BOUNDS = ("launch", "memory", "compute")
WHEN = ("forward", "backward", "step")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "broadcast")

_COUNT, _BYTES, _SIZE = AtLeast(1, int), AtLeast(0, int), AtLeast(0)
_LINE = {"fixed_s": _SIZE, "per_sample_s": _SIZE}
# Older records have none.
IDENTITY = {"parameters": Maybe((_BYTES, None)), "code": Maybe(str)}
_FORMS: dict[str, Any] = {
    "machine": {"threads": Maybe((_COUNT, None))},
    "batch_size": _COUNT, "samples": (_COUNT, None), "sample_bytes": _BYTES, "flop_per_sample": (_SIZE, None),
    "seconds": _SIZE,
    "parameters": {
        "count": _BYTES, "bytes": _BYTES, "trainable_count": _BYTES, "gradient_bytes": _BYTES,
        "optimizer_bytes": _BYTES, "buffer_bytes": _BYTES, "tied": list[str],
    },
    "gradients": {str: _BYTES},
    "memory": {
        "activation_bytes_per_sample": _SIZE, "activation_fixed_bytes": _SIZE, "workspace_bytes": _SIZE,
        "checkpointed_activation_bytes_per_sample": (_SIZE, None),
        "vector_bytes": Maybe((_BYTES, None)), "first_copies_bytes": Maybe((_BYTES, None)),
        "peak": [{"step_kind": str, "devices": _COUNT, "samples": _COUNT, "bytes": _BYTES}],
    },
    "timings": [
        {
            "step_kind": str, "threads": _COUNT, "devices": _COUNT, "samples": _COUNT, "part": OneOf(PARTS),
            "seconds": _SIZE, "spread": _SIZE, "step_spread": (_SIZE, None),
        }
    ],
    "fits": [
        {
            "step_kind": str, "threads": _COUNT, "several": bool, "part": OneOf(PARTS), **_LINE, "error": _SIZE,
        }
    ],
    "layers": [
        {
            "name": str, "type": str, "parameters": _BYTES, "parameter_bytes": _BYTES,
            "flop_per_sample": (_SIZE, None), "activation_bytes_per_sample": _SIZE, "forward": _LINE,
            "backward": _LINE, "bound": OneOf(BOUNDS), "why": str,
        }
    ],
    "collectives": [{"when": OneOf(WHEN), "what": OneOf(COLLECTIVES), "bytes": _BYTES, "times": _COUNT}],
    "buckets": [_BYTES], "identity": IDENTITY,
}  # fmt: skip


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
    ``checkpointed_activation_bytes_per_sample`` (or ``None``), ``workspace_bytes`` (most that a step takes beside), of
    one of several devices ``vector_bytes`` (what stays to add gradients up) and ``first_copies_bytes`` (what does in
    the first steps besides; ``None`` each where it is not known), and ``peak``: ``step_kind``, ``devices`` (as one of
    so many), ``samples``, ``bytes`` of a whole step, not of the first ones.

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
    ``not_in_threads``: why replicas could not be threads of one process (what they would share), or ``None``.
    ``busy``: what other programs kept busy meanwhile, like ``1.8 of 2 processors``, or ``""``.
    ``identity``: what tells the model from others of its name: ``parameters`` as it was built (``None``: its first run
    told) and ``code``, a digest of layers, shapes and code (``""``: not known).
    Raises ``UsageError`` for what is not of this form.
    """

    kind: ClassVar[str] = "workload"
    version: ClassVar[int] = 2
    forms: ClassVar[Mapping[str, Any]] = _FORMS

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
    not_in_threads: str | None = None
    busy: str = ""
    identity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checked()
        problem = _untimed(self)
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


def _untimed(record: Workload) -> str:
    timed = {(each["step_kind"], each["threads"], each["part"]) for each in record.timings}
    for place, fitted in enumerate(record.fits):
        if (fitted["step_kind"], fitted["threads"], fitted["part"]) not in timed:
            return f"fits[{place}] is of what no timing is of"
    both = sorted({kind for kind, *_ in timed} & set(record.step_kinds_left))
    return f"{both[0]} is timed and left out" if both else ""
