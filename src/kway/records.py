"""The records that stages hand to each other: frozen, validated, numbered, saved as JSON.

A record is the only thing that one stage tells the next. ``save`` writes a file under its final name only
when it is complete; ``load`` refuses a file of another kind or schema.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from kway.errors import UsageError
from kway.forms import AtLeast, Maybe, wrong
from kway.paths import check_reachable
from kway.units import ulps_text


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``: readers see the old file or the whole new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """Turn tuples into lists and numbers that JSON lacks (NaN, infinities) into strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True)
class Record:
    """Base of all records. A subclass names its ``kind`` (also its file: ``KIND.json``) and ``version``.

    ``forms``: by field what it holds (``kway.forms``), where its annotation does not tell all that is read of it.
    """

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    forms: ClassVar[Mapping[str, Any]] = {}

    def wrong(self) -> str:
        """Say which field is not of its form, or ``""``."""
        own = {entry.name: self.forms.get(entry.name, entry.type) for entry in fields(self)}
        return wrong({name: getattr(self, name) for name in own}, own)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON data, with ``kind`` and ``schema`` first."""
        body: dict[str, Any] = _plain(asdict(self))
        return {"kind": self.kind, "schema": self.version, **body}

    def to_json(self) -> str:
        """Return the record as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, folder: Path) -> Path:
        """Write ``KIND.json`` into ``folder`` and return its path."""
        path = folder / f"{self.kind}.json"
        write_atomically(path, (self.to_json() + "\n").encode())
        return path

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build the record from JSON data.

        Raises ``UsageError`` where kind or schema differ, or a field is missing or not of its form. Fields that this
        version does not know are left out: other programs may add some.
        """
        if data.get("kind") != cls.kind or data.get("schema") != cls.version:
            raise UsageError(
                f"a record of kind {data.get('kind')!r}, schema {data.get('schema')!r}",
                f"this reads {cls.kind!r}, schema {cls.version}",
            )
        names = {entry.name for entry in fields(cls)}
        needed = [each.name for each in fields(cls) if each.default is each.default_factory is MISSING]
        lacks = [name for name in needed if name not in data]
        if lacks:
            raise UsageError(f"a {cls.kind} record that does not hold together", f"{lacks[0]} is missing")
        made = cls(**{key: value for key, value in data.items() if key in names})
        return made if hasattr(cls, "__post_init__") else made.checked()  # that looks at it first

    def checked(self) -> Self:
        """Return the record. Raises ``UsageError`` where a field is not of its form."""
        problem = self.wrong()
        if problem:
            raise UsageError(f"a {self.kind} record that does not hold together", problem)
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record from its file, or from ``KIND.json`` in a folder."""
        check_reachable("record", path)
        file = path / f"{cls.kind}.json" if path.is_dir() else path
        try:
            data = json.loads(file.read_text())
        except FileNotFoundError:
            raise UsageError(f"no file {file}") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} is not a record: {error}") from None
        if not isinstance(data, dict):
            raise UsageError(f"{file} is not a record: it holds a {type(data).__name__}")
        return cls.from_dict(data)


@dataclass(frozen=True)
class Cluster(Record):
    """What a machine has. Memory in bytes.

    ``cpu``: ``model``, ``cores`` (physical, whole machine), ``usable`` (logical processors that this process
    may run on), ``memory_total``, ``memory_available``. ``gpus``: a list in torch's order of ``index`` (as
    torch counts), ``physical`` (as the driver counts), ``name``, ``uuid``, ``memory_total``,
    ``memory_free``, ``compute_capability``, ``bus``, ``numa_node``. ``hidden``: GPUs of the driver that the
    environment hides. ``links``: pairs ``a``, ``b`` (torch indices), ``peer`` (direct access) and ``over``.
    ``backends``: for ``cpu`` and ``cuda`` the ``name`` of the collective back end, ``why``, ``over`` (what connects
    them on this machine), ``rule`` (the row of ``kway.backends`` that applied), ``between_machines`` (the row there).
    ``torch``: ``version``, ``cuda`` and what a cache holds of facts that only torch knows. ``driver``: version, or
    ``None``; ``driver_cuda``: the newest CUDA that it runs. ``warnings``: lines for the user. ``numa``,
    ``infiniband``, ``interfaces``, ``mps``: see ``numa``, ``networks`` and ``mps`` in ``kway.devices``.
    ``attributes``: by device, where asked for (``attributes`` there). ``checks``: of the installation, where asked
    for (``doctor`` there).
    """

    kind: ClassVar[str] = "cluster"

    cpu: dict[str, Any]
    gpus: list[dict[str, Any]]
    hidden: list[dict[str, Any]]
    links: list[dict[str, Any]]
    backends: dict[str, dict[str, str]]
    torch: dict[str, Any]
    driver: str | None
    warnings: list[str]
    driver_cuda: str | None = None
    numa: list[dict[str, Any]] = field(default_factory=list)
    infiniband: list[dict[str, Any]] = field(default_factory=list)
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    mps: dict[str, Any] | None = None
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Plan(Record):
    """Which layout one run uses, on what. ``device_set`` holds torch device strings, one a rank.

    The record of all layouts that were priced is another one: ``kway.planned.Planned``, plan.json.

    ``step_kind``: how steps are to run; what did run stands in the record of the run. ``settings``: what else of them
    is chosen, by name (``kway.step.settings``).
    """

    kind: ClassVar[str] = "layout"
    forms: ClassVar[Mapping[str, Any]] = {"shards": AtLeast(1, int)}

    strategy: str
    layout: dict[str, int]
    device_set: list[str]
    exactness: str
    reason: str
    shards: int = 8
    step_kind: str = "eager"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """The number of devices, which is the number of ranks."""
        return len(self.device_set)


@dataclass(frozen=True)
class Training(Record):
    """What a training run did. Times in seconds, memory in bytes, one entry a rank where said so.

    ``step_kind``: how steps really ran (``kway.step.kinds``).
    ``holds_within`` says, at level bits, within what the bits hold. ``measured_step_s`` is the median over
    windows of at least 10 steps after warm-up, of wall time by step, synchronised at the ends of the window,
    input wait included, evaluation and saving excluded; ``None`` where the run was too short for one window.
    ``input_wait_s``: how long rank 0's device waited for batches; of a GPU, only the time without other work.
    ``peak_memory_bytes`` has one entry a rank. ``epochs`` holds ``epoch``, ``steps``, ``samples``,
    ``train_loss``, ``seconds`` (training only), ``samples_per_s``, ``lr``, one entry ``train_NAME`` a metric
    and, where there is validation data, ``validation_loss`` and one entry a metric. ``stopped_early``: whether a
    figure that was no longer better ended the run. ``ema``: decay of the moving average of the weights, which is
    then what validation figures and ``best`` are of; ``ema_sha256``: fingerprint of the average. ``checkpoints``:
    how many were ``saved`` and ``failed``, the ``last`` step, ``held_s`` (time that training waited, by save) and
    ``waited_s`` (all in all for the save before).
    ``wall_s``: from when a rank was ready to train to the end of training, validation and saving included; the start of
    ranks, tuning before it, and what is written at its end are not.
    ``own_work_s``: for CPU ranks, one entry a rank, the median over steps of what it does by itself: the step without
    the time inside collectives; ``None`` on GPUs and for short runs.
    ``job``: what was trained: ``data`` (its name, shapes or class), ``samples`` and ``held_out`` (``None``: a stream,
    or nothing), ``loss``, ``penalty``, ``schedule``, ``clip``, ``shuffle``, ``micro_batch``, ``workers``, ``init``,
    ``parameters`` (how many numbers) and ``trainable`` (of these), ``optimizer`` (``name``, ``groups`` of options as
    the run began). ``machine``: ``host`` and ``cpu`` of rank 0, ``usable`` (processors), ``gpus`` (models that were
    used), ``threads`` (of a rank). ``settings``: what was chosen of the step beside its kind (``kway.step.settings``).
    ``tuned``: ``how`` it was chosen (``Tuning``), ``why``, ``seconds``, ``made``, ``busy``, ``choice``; ``None`` where
    the run was not to be tuned. ``processes``: how many the ranks were; one where they were threads of it, ``None`` in
    records of before. ``timeline``: of the ``steps`` (their numbers, from 1) that were recorded, by rank, in seconds a
    step (docs/guide/timeline.md); ``None`` where none were. ``lr_scale``: how the learning rate of one device's batch
    was scaled: ``rule``, for ``devices`` of ``batch_size_per_device`` samples, the ``factor`` and after how many
    ``warmup_steps`` it is reached; ``None`` where it was not.
    """

    kind: ClassVar[str] = "train"
    # Numbers that JSON lacks are texts: a loss may be one.
    forms: ClassVar[Mapping[str, Any]] = {
        "epochs": [{"epoch": int, "seconds": Maybe(AtLeast(0))}],
    }

    model: str
    strategy: str
    devices: int
    device_set: list[str]
    layout: dict[str, int]
    exactness: str
    step_kind: str
    precision: str
    batch_size: int
    seed: int
    steps: int
    resumed_from_step: int | None
    predicted_step_s: float | None
    measured_step_s: float | None
    input_wait_s: float
    peak_memory_bytes: list[int]
    weights_sha256: str
    epochs: list[dict[str, Any]]
    best: dict[str, Any] | None
    notices: list[str]
    versions: dict[str, str]
    started: str
    wall_s: float
    holds_within: dict[str, Any] | None = None
    stopped_early: bool = False
    ema: float | None = None
    ema_sha256: str | None = None
    checkpoints: dict[str, Any] | None = None
    own_work_s: list[float] | None = None
    job: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    tuned: dict[str, Any] | None = None
    processes: int | None = None
    timeline: dict[str, Any] | None = None
    lr_scale: dict[str, Any] | None = None


# What is read of a candidate, timed or not.
_TRIED: dict[str, Any] = {"choice": dict[str, Any], "cost_s": (AtLeast(0), None), "verdict": str}


@dataclass(frozen=True)
class Tuning(Record):
    """What was tried to find the fastest way to take a job's steps, and what was chosen.

    ``choice``: values by name (``kway.tuning.knobs``), empty for the step as it is. ``how``: ``measured``,
    ``remembered`` (from ``made``, under the same conditions) or ``left``, with ``why``. ``rows``: one a candidate with
    ``stage``, ``choice``, ``step_s`` (median over windows, the slowest rank's), ``spread``, ``ratio`` (to the step as
    it is; of what was measured once more, to the faster of its times), ``cost_s`` (what trying it took), ``verdict``.
    ``seconds``: what all of it took, of ``budget_s`` asked for.
    ``chosen_step_s`` and ``plain_step_s``: the choice and the step as it is; ``None`` where nothing was measured.
    ``again``: the ratio of both when they were measured once more; ``None`` where they were not. ``busy``: what other
    programs kept busy when it was measured, like ``1.8 of 2 processors``, or ``""``.
    """

    kind: ClassVar[str] = "tune"
    forms: ClassVar[Mapping[str, Any]] = {
        "rows": [
            (
                {**_TRIED, "step_s": AtLeast(0), "spread": AtLeast(0), "ratio": AtLeast(0)},
                {**_TRIED, "step_s": None},
            )
        ],
    }  # fmt: skip

    model: str
    strategy: str
    devices: int
    device_set: list[str]
    exactness: str
    precision: str
    batch_size: int
    choice: dict[str, Any]
    how: str
    why: str
    made: str
    rows: list[dict[str, Any]]
    seconds: float
    budget_s: float | None
    plain_step_s: float | None
    chosen_step_s: float | None
    notices: list[str]
    versions: dict[str, str]
    machine: dict[str, Any] = field(default_factory=dict)
    again: float | None = None
    busy: str = ""


@dataclass(frozen=True)
class Proof(Record):
    """What a comparison with one device found.

    ``candidates`` has a row for each pair of strategy and number of devices: ``strategy``, ``devices``,
    ``device_set``, ``level``, ``equal`` (``bits``, ``ulps``, ``no``, ``refused``, ``skipped``), ``reason``,
    ``max_ulps`` (ulps of the tensor's largest magnitude), ``max_abs_diff``, ``first_difference`` (``step``,
    ``tensor``), ``tensors`` (how many were compared) and ``step_kind`` (how its steps really ran). The record's own
    ``step_kind`` is the one of all rows that were compared, several by commas. ``certificate``, at level bits:
    ``holds_within`` and, for each of ``steps``, the SHA-256 of loss, gradient, parameters, buffers, optimizer state
    and, where there is one, the moving average of the weights. ``against``: the ``file`` whose certificate was checked
    and
    the first ``disagreement``, or ``None``. ``seed``, ``versions``, ``started``, ``job``, ``machine``: as in
    ``Training``, with the optimizer that the proof ran with; ``machine`` is the caller's, without ``threads``.
    """

    kind: ClassVar[str] = "proof"
    forms: ClassVar[Mapping[str, Any]] = {
        "candidates": [
            # Numbers that JSON lacks are texts.
            {
                "strategy": str, "devices": int, "equal": str, "reason": str, "max_ulps": (float, str, None),
                "tensors": int,
            }
        ],
        "certificate": (
            {
                "holds_within": dict[str, Any], "model": str, "batch_size": int, "precision": str, "seed": (int, None),
                "steps": [dict[str, str]],
            },
            None,
        ),
    }  # fmt: skip

    model: str
    reference: dict[str, Any]
    verdict: str
    batch_size: int
    precision: str
    steps: int
    candidates: list[dict[str, Any]]
    notices: list[str]
    certificate: dict[str, Any] | None = None
    against: dict[str, Any] | None = None
    seed: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    started: str = ""
    job: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    step_kind: str = "eager"

    def __repr__(self) -> str:
        """Say the verdict and what each row found; the tensors are in the fields."""
        return f"Proof({self.model}: {self.verdict}; {', '.join(map(_found, self.candidates))})"

    def __str__(self) -> str:
        """Return the verdict, a line for each row with its reason, and the notices."""
        rows = [f"  {_found(row)}" + f" ({row['reason']})" * bool(row["reason"]) for row in self.candidates]
        notes = [f"  note: {text}" for text in self.notices]
        return "\n".join([f"proof of {self.model}: {self.verdict}", *rows, *notes])


def _found(row: dict[str, Any]) -> str:
    """Format a row of a proof: ``data=2 on 2 devices: ulps, 14.2 at most in 75 tensors``."""
    count = row["devices"]
    text = f"{row['strategy']} on {count} device{'' if count == 1 else 's'}: {row['equal']}"
    if row["equal"] not in ("bits", "ulps"):
        return text
    ulps = row["max_ulps"]
    most = ulps if isinstance(ulps, str) else ulps_text(ulps)  # infinity is a text in a file
    return f"{text}{f', {most} at most' if row['equal'] == 'ulps' else ''} in {row['tensors']} tensors"
