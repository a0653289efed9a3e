"""What can be tried, and in which order: input that is waited for, which hides all else; then on GPUs what mostly wins,
on CPUs what is cheap to try, and what has to be compiled after it. Data, and nothing that measures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kway.comm.buckets import usual_bytes
from kway.errors import UsageError
from kway.job import PRECISIONS
from kway.registry import known
from kway.step.kinds import KINDS
from kway.step.pieces import cuts_code
from kway.step.settings import MIB, Settings
from kway.units import counted

# A choice: values by name, of ``NAMES``. What is not named is as job and plan have it.
Choice = Mapping[str, Any]

SETTINGS = frozenset(entry.name for entry in fields(Settings))
JOB = frozenset({"precision", "workers"})
NAMES = SETTINGS | JOB | {"step_kind"}
# Below it one bucket holds all gradients, and another size changes nothing.
SEVERAL_BUCKETS = 50 * 2**20
# Precisions in which cuDNN has an attention kernel.
NARROW = frozenset({"bf16", "fp16"})


@dataclass(frozen=True)
class Subject:
    """What is known before anything is tried.

    ``device``: ``"cuda"`` or ``"cpu"``; ``ranks``; ``level``; ``precision``; ``threads`` of a rank; ``step_kind``: the
    one that the user named, or ``None``; ``allowed``: precisions that may be chosen beside the job's own;
    ``compiler``: whether torch.compile can work here; ``images``: whether parameters have four dimensions;
    ``attention``: whether the model calls ``scaled_dot_product_attention``; ``forms``: how the optimizer can go over
    its parameters; ``gradient_bytes``; ``waits``: the part of a step in which it waits for input; ``workers``: loader
    processes of a rank, ``None`` where no other number may be tried, and ``no_workers`` says why; ``micro_batch``: the
    samples that a device computes at once, and whether they ``may_be_cut`` further; ``named``: what the user has
    chosen, and is left.
    """

    device: str
    ranks: int = 1
    level: str = "math"
    precision: str = "fp32"
    threads: int = 1
    step_kind: str | None = None
    allowed: tuple[str, ...] = ()
    compiler: bool = True
    images: bool = False
    attention: bool = False
    forms: tuple[str, ...] = ()
    gradient_bytes: int = 0
    waits: float = 0.0
    workers: int | None = None
    no_workers: str = ""
    micro_batch: int = 1
    may_be_cut: bool = False
    named: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stage:
    """Changes to the best choice so far, of which the fastest stays."""

    name: str
    changes: tuple[Choice, ...]


def stages(subject: Subject) -> list[Stage]:
    """List what is tried for a subject, in order."""
    found = [
        # First: while a step waits for input, nothing else makes it faster, and all take as long.
        Stage("input", _input(subject)),
        Stage(
            "precision", tuple({"precision": name} for name in subject.allowed if name != subject.precision)
        ),
        *(_on_gpu(subject) if subject.device == "cuda" else _on_cpu(subject)),
    ]
    return [stage for stage in (_without(stage, subject.named) for stage in found) if stage.changes]


def _without(stage: Stage, named: frozenset[str]) -> Stage:
    """Leave what the user has chosen as it is."""
    kept = ({name: value for name, value in change.items() if name not in named} for change in stage.changes)
    return Stage(stage.name, tuple(change for change in kept if change))


def untried(subject: Subject) -> str:
    """Say of which settings no value is tried for a subject, and why; ``""`` where some of each are."""
    tried = {name for stage in stages(subject) for change in stage.changes for name in change}
    whys = {**_why_not(subject), **dict.fromkeys(subject.named, "named")}
    if subject.step_kind is not None:
        whys["step_kind"] = "named"
    left = [f"{name} ({why})" for name, why in whys.items() if name not in tried]
    return f"no candidates here: {', '.join(left)}" if left else ""


def _why_not(subject: Subject) -> dict[str, str]:
    """Return, of each setting that this kind of device has, why nothing of it would be tried."""
    bits = "fixed at level bits" if subject.level == "bits" else ""
    several = f"one device, or less than {SEVERAL_BUCKETS >> 20} MiB of parameters"
    common = {
        "memory_format": "no parameter has four dimensions",
        "optimizer": "it leaves nothing to choose",
        "step_kind": "no compiler was found",
        "bucket_mib": bits or several,
        "workers": subject.no_workers or "a step hardly waits for input",
    }
    if subject.device == "cuda":
        return common | {
            "attention": "only in bf16 and fp16, where a model calls it",
            "autotune": bits or "only for images",
            "overlap": bits or "only compiled steps on several GPUs",
            "compile_mode": bits or "nothing is compiled",
        }
    few = (
        f"{counted(subject.micro_batch, 'sample')} at once"
        if subject.may_be_cut
        else "the level cuts no share"
    )
    return common | {
        "threads": bits or f"a rank has {subject.threads}",
        "micro_batch": bits or few,
    }


def _on_gpu(subject: Subject) -> list[Stage]:
    fused = {"optimizer": "fused"} if "fused" in subject.forms else {}
    laid_out = {"memory_format": "channels_last"} if subject.images else {}
    kinds = [subject.step_kind] if subject.step_kind else list(_kinds(subject))
    # What mostly wins comes first, whole: where time is short it is the only one that is tried.
    likely = tuple({"step_kind": kind, **fused, **laid_out} for kind in kinds)
    if likely == ({"step_kind": subject.step_kind},):
        likely = ()
    compiled = any(KINDS[kind].compiles for kind in kinds)
    cut = cuts_code(compiled, subject.device, subject.ranks, subject.level)
    return [
        Stage("step kind", likely),
        Stage("memory format", ({"memory_format": "contiguous"},) if laid_out else ()),
        Stage("attention", _attention(subject)),
        # Which algorithm wins depends on the moment: at level bits it would on two ranks.
        Stage("convolutions", ({"autotune": True},) if subject.images and subject.level != "bits" else ()),
        Stage("optimizer", tuple({"optimizer": form} for form in subject.forms if form != "fused")),
        Stage("overlap", ({"overlap": False},) if cut else ()),
        Stage("buckets", _buckets(subject, cut)),
        Stage("compile mode", _compile_modes(subject) * compiled),
    ]


def _compile_modes(subject: Subject) -> tuple[Choice, ...]:
    # Where algorithms must repeat themselves the compiler times none.
    return () if subject.level == "bits" else ({"compile_mode": "searched"}, {"compile_mode": "max-autotune"})


def _kinds(subject: Subject) -> tuple[str, ...]:
    return ("compiled-graph", "graph", "compiled") if subject.compiler else ("graph",)


def _on_cpu(subject: Subject) -> list[Stage]:
    compiles = subject.compiler and subject.step_kind in (None, "compiled")
    fewer = sorted({1, subject.threads // 2} - {0, subject.threads}) if subject.level != "bits" else []
    return [
        Stage("memory format", ({"memory_format": "channels_last"},) if subject.images else ()),
        Stage("optimizer", tuple({"optimizer": form} for form in subject.forms)),
        Stage("threads", tuple({"threads": count} for count in fewer)),
        # Before compiled code, which another size would compile anew.
        Stage("micro-batch", _micro_batch(subject)),
        Stage(
            "buckets", _buckets(subject, cuts_code(compiles, subject.device, subject.ranks, subject.level))
        ),
        Stage("step kind", ({"step_kind": "compiled"},) if compiles else ()),
    ]


def _attention(subject: Subject) -> tuple[Choice, ...]:
    narrow = subject.precision in NARROW or bool(NARROW.intersection(subject.allowed))
    return ({"attention": "cudnn"},) if subject.attention and narrow else ()


def _buckets(subject: Subject, is_cut: bool) -> tuple[Choice, ...]:
    if subject.ranks == 1 or subject.gradient_bytes < SEVERAL_BUCKETS or subject.level == "bits":
        return ()
    usual = usual_bytes(subject.gradient_bytes, is_cut) / MIB
    return ({"bucket_mib": round(usual / 2.5)}, {"bucket_mib": round(usual * 4)})


def _input(subject: Subject) -> tuple[Choice, ...]:
    if subject.workers is None or subject.waits < 0.05:
        return ()
    return tuple({"workers": count} for count in (2, 4, 8) if count > subject.workers)


def _micro_batch(subject: Subject) -> tuple[Choice, ...]:
    half = subject.micro_batch // 2
    return ({"micro_batch": half},) if subject.may_be_cut and half >= 32 else ()


def check_choice(choice: Choice) -> Choice:
    """Return a choice that is well formed. Raises ``UsageError``."""
    for name, value in choice.items():
        known("setting", name, dict.fromkeys(sorted(NAMES)))
        if name == "step_kind":
            known("step kind", value, KINDS)
        elif name == "precision":
            known("precision", value, PRECISIONS)
        elif name in JOB and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise UsageError(f"{name}={value!r}", "it must be a whole number")
    Settings.of({name: value for name, value in choice.items() if name in SETTINGS})
    return choice
