"""Who judges a candidate of a proof: by rounding against plain torch, or by bits against one device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kway.comm.group import Group
from kway.data.loader import cut
from kway.data.order import Indices
from kway.data.parts import Parts
from kway.job import Job
from kway.proving import candidate
from kway.proving.certificate import fingerprints
from kway.proving.compare import EPSILONS, NOISE_FACTOR, UNSTEADY, Comparison
from kway.proving.quiet import without_dropout
from kway.proving.reference import Reference, Snapshot
from kway.proving.shard_reference import ShardReference
from kway.step.batchnorm import without_statistics
from kway.step.deterministic import bits_hold_within, deterministic
from kway.step.gather import WholeBatch
from kway.step.out_of_memory import Memory
from kway.step.precision import precision_of
from kway.step.presence import Presence
from kway.step.storage import to_bytes
from kway.training.subject import optimizer_facts
from kway.units import counted, ulps_text

OTHER_ORDERS = 3
# What torch's optimizers call their sums of squares: by the root of them they divide a step.
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf"}
# Tensors that such a step moves.
MOVED = ("model/", "average/")
RULE = (
    f"largest difference at most {NOISE_FACTOR} times the reference's own noise, or {EPSILONS} eps times the "
    "tensor's largest magnitude"
)
# Runs one candidate on its devices (None: on one device, in this process) and returns what rank 0 returned.
Runner = Callable[[candidate.CandidateSpec], dict[str, Any]]


@dataclass
class Case:
    """What is proved: a job on ``batches``, from the state of ``model``, which the reference may train.

    ``scratch``: a folder for states; ``home``: the one device; ``shards``: micro-shards at level bits.
    """

    job: Job
    parts: Parts
    model: nn.Module
    batches: list[tuple[int, Indices]]
    scratch: Path
    home: torch.device
    shards: int
    step_kind: str = "eager"
    settings: dict[str, Any] = field(default_factory=dict)

    def spec(self, layout: dict[str, int], level: str, free: bool = False) -> candidate.CandidateSpec:
        """Describe a candidate for its ranks."""
        return candidate.CandidateSpec(
            self.job,
            self.parts,
            layout,
            level,
            str(self.scratch),
            self.batches,
            self.shards,
            free,
            self.step_kind,
            self.settings,
        )


class Judge(ABC):
    """Judges candidates on one case, beside a reference.

    ``notices``: lines for the user, ``loss_doubts`` among them: what in the loss may not add up; ``optimizer``: what
    the reference began with (``optimizer_facts``); ``divides``: its class where it divides by the root of squares of
    gradients; ``uneven``: that parts of one batch came in several shapes.
    """

    def __init__(self, case: Case, reference: Reference | ShardReference) -> None:
        self.case = case
        self.notices: list[str] = []
        self.loss_doubts: list[str] = []
        self.uneven: list[str] = []
        self.optimizer = optimizer_facts(reference.optimizer)
        self.divides = ""

    def _hear(self, result: dict[str, Any]) -> None:
        """Keep what a candidate has to say."""
        self.notices += [*result["notices"], *result["doubts"]]
        self.loss_doubts += result["loss_doubts"]
        self.uneven += result["uneven"]

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Say what the reference is and how it judges."""

    @abstractmethod
    def compare(self, layout: dict[str, int], run: Runner) -> dict[str, Any]:
        """Run a candidate and return what differs, as entries of a row of the proof."""


class MathJudge(Judge):
    """Every step starts from the reference's state; tensors may differ by rounding."""

    def __init__(self, case: Case, level: str = "math") -> None:
        reference = Reference(case.job, case.model, case.home)
        super().__init__(case, reference)
        self._level = level
        self._snapshots = _run(reference, case, _orders(case, None), self.notices)
        held = {name.rpartition("/")[2] for name in self._snapshots[0].after if name.startswith("optimizer/")}
        self.divides = self.optimizer["name"] if held & SQUARES else ""

    def describe(self) -> dict[str, Any]:
        """Say what the reference is and how it judges."""
        return {
            "loop": "plain torch on one device, whole batches",
            "device": str(self.case.home),
            "rule": RULE,
            "orders": OTHER_ORDERS + 1,
            "losses": [float(snapshot.after["loss"]) for snapshot in self._snapshots],
        }

    def compare(self, layout: dict[str, int], run: Runner) -> dict[str, Any]:
        """Compare by the noise of the reference."""
        result = run(self.case.spec(layout, self._level))
        self._hear(result)
        return _by_noise(self.case, self._snapshots, result)


class BitsJudge(Judge):
    """Every tensor of a free run, dropout on, must have the bits of kway's one-device run.

    That run's step must itself pass against plain torch over the same shards, so that equally wrong is not
    right.
    """

    def __init__(self, case: Case, alone: Runner) -> None:
        reference = ShardReference(case.job, case.model, case.home)
        super().__init__(case, reference)
        with deterministic(case.home):
            snapshots = _run(reference, case, _orders(case, case.shards), self.notices, case.shards)
        self.anchor = _by_noise(case, snapshots, alone(case.spec({}, "bits")))
        own = alone(case.spec({}, "bits", free=True))
        self._digests, self._kind = own["digests"], own["step_kind"]
        self._losses = [float(snapshot.after["loss"]) for snapshot in snapshots]

    def describe(self) -> dict[str, Any]:
        """Say what the reference is and how it judges."""
        return {
            "loop": "kway on one device over the same shards, which passes against plain torch over the shards"
            if self.anchor["equal"] != "no"
            else f"kway on one device FAILS against plain torch over the shards: {self.anchor['reason']}",
            "device": str(self.case.home),
            "rule": f"equal bits; one device against plain torch: {RULE}",
            "orders": OTHER_ORDERS + 1,
            "anchor": self.anchor,
            "losses": self._losses,
        }

    def compare(self, layout: dict[str, int], run: Runner) -> dict[str, Any]:
        """Compare the SHA-256 of every tensor of every step."""
        result = run(self.case.spec(layout, "bits", free=True))
        self._hear(result)
        row: dict[str, Any] = {
            "equal": "bits",
            "reason": "",
            "max_ulps": 0.0,
            "max_abs_diff": 0.0,
            "first_difference": None,
            "shares": result["shares"],
            "tensors": sum(len(tensors) for tensors in self._digests),
            "step_kind": result["step_kind"],
        }
        if self.anchor["equal"] == "no":
            return row | {"equal": "no", "reason": f"one device: {self.anchor['reason']}", "max_ulps": None}
        for step, (own, got) in enumerate(zip(self._digests, result["digests"], strict=True), 1):
            stray = result["strays"][step - 1]
            name = next((n for n in [*own, *got] if own.get(n) != got.get(n)), stray and stray[1])
            if name is not None:
                return row | {
                    "equal": "no",
                    "reason": f"{name} has other bits than on one device at step {step}",
                    "max_ulps": None,
                    "max_abs_diff": None,
                    "first_difference": {"step": step, "tensor": name},
                }
        return row

    def certificate(self) -> dict[str, Any]:
        """Return the fingerprints of the one-device run, and within what they hold."""
        case = self.case
        return {
            "holds_within": bits_hold_within(case.home, case.shards, self._kind, settings=case.settings),
            "model": case.job.title,
            "batch_size": max(len(indices) for _, indices in case.batches),
            "precision": case.job.precision,
            "seed": case.job.seed,
            "steps": fingerprints(self._digests, {name for name, _ in case.model.named_buffers()}),
        }


def _run(
    reference: Reference, case: Case, orders: Iterator[Sequence[Any]], notices: list[str], shards: int = 1
) -> list[Snapshot]:
    """Take the steps of a reference; put the state before each where candidates find it."""
    snapshots = []
    batch = WholeBatch(Group(), Presence(), shards)
    flags = precision_of(case.job.precision).flags()
    memory = Memory(case.job, case.model, case.home, rank=0)
    memory.held_by(reference.optimizer)
    try:
        with without_dropout(case.model) as silenced, flags, batch.current(), memory.explains("reference"):
            for step, snapshot in enumerate(reference.steps(orders)):
                candidate.before_file(case.scratch, step).write_bytes(to_bytes(snapshot.before))
                snapshots.append(replace(snapshot, before={}))
    except ValueError as error:
        told = without_statistics(error, len(case.batches[len(snapshots)][1]))
        if told is None:
            raise
        raise told from error
    if silenced:
        notices.append(f"dropout is off where plain torch is compared: {', '.join(silenced)}")
    return snapshots


def _by_noise(case: Case, snapshots: list[Snapshot], result: dict[str, Any]) -> dict[str, Any]:
    comparison = Comparison()
    for step, snapshot in enumerate(snapshots):
        comparison.add(step + 1, snapshot, candidate.after(case.scratch, step))
        stray = result["strays"][step]
        if stray is not None:
            comparison.fail(step + 1, stray[1], f"{stray[1]} of rank {stray[0]} is not that of rank 0")
    return {
        "equal": comparison.equal,
        "reason": comparison.reason,
        "max_ulps": round(comparison.max_ulps, 1),
        "max_abs_diff": comparison.max_abs_diff,
        "first_difference": comparison.first_difference,
        "shares": result["shares"],
        "tensors": comparison.tensors,
        "step_kind": result["step_kind"],
        "noise_only": sorted(comparison.noise_only),
        "by_noise": sorted(comparison.by_noise),
    }


def far_and_right(judge: Judge, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on why tensors pass that are many units apart, where no row fails."""
    far = [row for row in rows if row["equal"] == "ulps" and row.get("by_noise")]
    if not far or any(row["equal"] in ("no", "refused") for row in rows):
        return []
    names = sorted(
        {name for row in far for name in row["by_noise"]}, key=lambda name: not name.startswith(MOVED)
    )
    most = ulps_text(max(row["max_ulps"] for row in far))
    text = (
        f"up to {most} ulps are right here: another order of the samples moves {counted(len(names), 'tensor')} "
        f"({names[0]}{', ...' * (len(names) > 1)}) by as much on one device"
    )
    if judge.divides and names[0].startswith(MOVED):
        text += f"; {_magnifies(judge)}"
    return [text]


def differing(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that fail for what devices change: not those of a reference that differs from itself."""
    return [row for row in rows if row["equal"] == "no" and UNSTEADY not in row["reason"]]


def magnified(judge: Judge, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line where a row fails whose optimizer may have made much of rounding. Bits are not rounded apart."""
    if not judge.divides or not any(row["level"] != "bits" for row in differing(rows)):
        return []
    return [
        f"{_magnifies(judge)}: what differs may be no more than that. The proof with SGD (without --optimizer, in "
        "Python without own_optimizer) tells whether the arithmetic is the same"
    ]


def _magnifies(judge: Judge) -> str:
    return (
        f"{judge.divides} divides by the root of squared gradients, and magnifies rounding where it is tiny"
    )


def _orders(case: Case, shards: int | None) -> Iterator[Sequence[Any]]:
    """Yield each batch as it is and with its samples in three other orders: reversed, and shuffled twice.

    With ``shards``, a batch is the list of its shards that hold samples, and orders change within a shard.
    """
    shuffle = np.random.Generator(np.random.Philox(case.job.seed))

    def reverse(indices: Indices) -> Indices:
        # A copy: torch takes no negative stride, which a single index would keep.
        return indices[::-1].copy()

    changes: list[Callable[[Indices], Indices]] = [lambda indices: indices, reverse]
    changes += [shuffle.permutation] * (OTHER_ORDERS - 1)

    def read(indices: Indices, epoch: int, step: int) -> Any:
        whole = np.ascontiguousarray(indices)
        share = cut(case.parts, whole, epoch=epoch, step=step, rank=0, size=1, seed=case.job.seed)
        return share.micro[0][0]

    for step, (epoch, indices) in enumerate(case.batches):
        if shards is None:
            yield [read(change(indices), epoch, step) for change in changes]
        else:
            pieces = [piece for piece in np.array_split(indices, shards) if len(piece)]
            yield [[read(change(piece), epoch, step) for piece in pieces] for change in changes]
