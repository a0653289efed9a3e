"""``kway.prove``: compares k devices with one, tensor by tensor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kway.data.order import Indices
from kway.data.parts import Parts
from kway.data.stream_reader import held
from kway.devices.select import parse_list, warnings
from kway.devices.topology import discover
from kway.errors import KwayError, OutOfMemoryError, RefusedError, UsageError, line_of
from kway.job import Job
from kway.jobs.arguments import check_given
from kway.jobs.folder import claimed
from kway.jobs.judges import BitsJudge, Case, Judge, MathJudge, differing, far_and_right, magnified
from kway.jobs.place import Place, choose, rank_threads
from kway.launch.one_run import alone
from kway.launch.torchrun import from_environment
from kway.planned import device_type
from kway.proving import candidate
from kway.proving.certificate import first_disagreement
from kway.records import Cluster, Proof
from kway.step.build import build
from kway.step.kinds import DEFAULT_KIND, check_kind
from kway.step.settings import Settings
from kway.strategies.layout import check_level, check_model, fit, named_sizes, title
from kway.strategies.levels import DEFAULT_SHARDS
from kway.training.facts import facts_of
from kway.training.on_a_copy import copied
from kway.training.parts import training_parts
from kway.training.spec import positive
from kway.training.subject import function_name, subject_of
from kway.training.surroundings import machine, versions

STEPS, STEPS_RECORDED = 3, 6
BLAMED = (
    "the loss is the likely cause of what differs: a scalar that is no mean over samples (a sum, a mean over other "
    "elements, or one that weighs or ignores some) does not add up over devices"
)


@alone
def prove(
    job: Job,
    *,
    devices: Any = "auto",
    strategy: str = "data",
    exactness: str = "math",
    shards: int = DEFAULT_SHARDS,
    step_kind: str = DEFAULT_KIND,
    settings: Mapping[str, Any] | None = None,
    steps: int | None = None,
    out: Path | str | None = None,
    precision: str | None = "auto",
    own_optimizer: bool = False,
    against: Path | str | None = None,
    on_start: Callable[[Sequence[str]], None] | None = None,
    echo: bool = True,
    ranks: Any = None,
) -> Proof:
    """Compare every tensor of ``steps`` optimizer steps on each device set with one device.

    ``steps``: by default 3, and 6 for a step kind that records steps, so that recorded ones are among them.
    ``step_kind``, ``settings``: how the steps of kway run, as in ``kway.train``; plain torch runs operation by
    operation.
    ``devices``: one set or a list of sets (``"1,2,3"``, ``"cpu:2 cuda:0,1"``); ``strategy``: one or several,
    separated by commas; every pair is a row of the proof. ``precision``: ``"auto"`` is float64 at level math and
    the job's own at level bits; ``None`` is the job's own. Runs with SGD (lr 0.1, momentum 0.9) unless
    ``own_optimizer`` is set: adaptive optimizers hide wrong factors, and a notice names the job's.
    Writes proof.json into ``out``.

    At level math the other side is a plain torch loop, dropout is off, and rounding may differ. At level bits it
    is kway on one device over the same ``shards``, dropout on, and nothing may differ; ``against`` names a
    proof.json whose certificate this machine must reproduce. ``on_start`` is called with what there is to
    warn of (more ranks than cores; the proof's notices hold it as well), once the input has been found to work and
    before anything is computed.

    Raises ``UsageError`` before anything starts.
    """
    check_given(job, ranks, out=out, against=against)
    positive("steps", steps, optional=True)
    if from_environment() is not None:
        raise UsageError("a proof inside ranks that are already there", "it starts its own", "run it outside")
    cluster = discover()
    if precision == "auto":
        precision = job.precision if exactness == "bits" else "fp64"
    job = replace(job, precision=precision or job.precision)
    notices = [] if own_optimizer else _notice_optimizer(function_name(job.optimizer))
    if not own_optimizer:
        job = replace(job, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    strategies = _strategies(strategy, exactness, shards)
    other = _certificate(against, exactness)
    sets = parse_list(devices, cluster)
    # Of the largest set: the smaller have cores enough, or too few as well.
    warned = warnings(max(sets, key=lambda chosen: chosen.count("cpu")), cluster)
    kind = check_kind(step_kind, [device for chosen in sets for device in chosen])
    steps = steps or (STEPS_RECORDED if kind.records else STEPS)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    whole, held_out = training_parts(job)
    parts = held(whole, job.seed, steps)
    is_made = not isinstance(job.model, torch.nn.Module)
    # An instance stays as the user has it, with init or without.
    job = job if is_made else _copied(job.model, job)[0]
    model = build(job)
    alone = Place(
        choose([sets[0][0]], "single", exactness, shards, step_kind, settings),
        rank_threads([sets[0][0]]),
        None,
    )
    subject = subject_of(
        Settings.of(alone.plan.settings).on(job),
        facts_of(job, whole, alone.plan, model),
        model,
        whole,
        held_out,
    )
    job = job if is_made else replace(job, init=None)
    # The fingerprints of a certificate must not depend on which devices were asked for.
    batches = draw(parts, steps, shards if exactness == "bits" else max(len(chosen) for chosen in sets))
    # Whether a batch is cut in time is judged row by row: a plain loop over whole batches cuts none.
    uncut = job if exactness == "bits" else replace(job, micro_batch=None)
    check_model(
        uncut,
        model,
        {},
        exactness,
        max(len(indices) for _, indices in batches),
        shards,
        settings=alone.plan.settings,
    )
    with claimed(out, "proof.json") as folder, claimed(None, "before") as scratch:
        if on_start is not None:
            on_start(warned)
        # The reference trains and casts the model, and its loss goes with it.
        own, shared = _copied(model, job)
        case = Case(
            replace(own, model=job.model),
            parts,
            own.model,
            batches,
            scratch,
            torch.device(sets[0][0]),
            shards,
            step_kind,
            alone.plan.settings,
        )

        run = partial(_run, model, job, echo=echo, ranks=ranks)
        judge: Judge
        certificate = None
        if exactness == "bits":
            judge = BitsJudge(case, lambda spec: run(alone, spec))
            certificate = judge.certificate()
        else:
            judge = MathJudge(case, exactness)
        rows = [_row(case, judge, text, chosen, exactness, run) for text in strategies for chosen in sets]
        disagreement = None
        if other is not None and certificate is not None:
            disagreement = first_disagreement(certificate, other)
        proof = Proof(
            model=job.title,
            reference=judge.describe(),
            verdict="pass" if _holds(rows, strategies) and disagreement is None else "fail",
            batch_size=max(len(indices) for _, indices in batches),
            precision=job.precision,
            steps=steps,
            candidates=rows,
            notices=list(
                dict.fromkeys(
                    [
                        *_blamed(judge, rows),
                        *magnified(judge, rows),
                        *notices,
                        *shared,
                        *warned,
                        *parts.notices,
                        *judge.notices,
                        *far_and_right(judge, rows),
                    ]
                )
            ),
            certificate=certificate,
            against=None if other is None else {"file": str(against), "disagreement": disagreement},
            seed=job.seed,
            versions=versions(),
            started=started,
            job={**subject, "optimizer": judge.optimizer},
            machine=machine(_gpus(sets, cluster)),
            step_kind=", ".join(sorted({row["step_kind"] for row in rows if row["step_kind"]})) or step_kind,
        )
        if out is not None:
            proof.save(folder)
    return proof


def _run(
    model: torch.nn.Module, job: Job, where: Place, spec: candidate.CandidateSpec, *, echo: bool, ranks: Any
) -> dict[str, Any]:
    """Run a candidate there, in this process on copies of ``model`` and of what ``job`` calls."""
    own = job if where.starts_ranks else _copied(model, job)[0]
    spec = replace(spec, job=replace(own, model=job.model))
    models = [] if where.starts_ranks else [own.model]
    result: dict[str, Any] = where.run(run_rank, spec, *models, echo=echo, ranks=ranks)[0]
    return result


def _copied(model: torch.nn.Module, job: Job) -> tuple[Job, list[str]]:
    """Return the job of a copy of ``model``, which is its model, with copies of what is called beside it; and notices.

    What is called stays the user's own where it cannot be copied, which a notice says. Raises ``UsageError`` where the
    model cannot be.
    """
    try:
        own, beside = copied(model, job)
    except Exception as error:
        called = [name for name in ("loss", "penalty", "inputs", "target") if getattr(job, name) is not None]
        named = [*called, *(["metrics"] if job.metrics else [])]
        return replace(job, model=_copied_alone(model, job)), [
            f"not copied for the proof, which may change them: the job's {', '.join(named)} "
            f"({line_of(error)})"
        ]
    return replace(job, model=own, **beside), []


def _copied_alone(model: torch.nn.Module, job: Job) -> torch.nn.Module:
    try:
        return copied(model, replace(job, loss=None, penalty=None, inputs=None, target=None, metrics={}))[0]
    except Exception as error:
        raise UsageError(
            f"a model that cannot be copied ({line_of(error)})",
            "a proof trains copies of it, so that yours stays as it is",
            "let the job make the model: pass its class, or a function",
        ) from error


def _strategies(names: str, exactness: str, shards: int) -> list[str]:
    """Take the names of strategies apart. Raises ``UsageError`` for one that is none, and for such a level."""
    check_level({}, exactness, shards)
    # What is no text is refused by its own name.
    found = [text.strip() for text in str(names).split(",")]
    for text in found:
        named_sizes(text)
    return found


def _notice_optimizer(own: str | None) -> list[str]:
    """Say that the proof is of another optimizer than the job's, where that one is no SGD itself."""
    if own == "SGD":
        return []
    return [
        f"proved with SGD (lr 0.1, momentum 0.9) instead of the job's {own}, whose steps may hide a wrong factor of "
        "gradients. To prove with that one: own_optimizer=True, on the command line --optimizer path/file.py:function"
    ]


def _blamed(judge: Judge, rows: list[dict[str, Any]]) -> list[str]:
    """Say what is suspected where a row differs: a loss that may not add up, and padding that may count."""
    if not differing(rows):
        return []
    padding = [f"a possible cause of what differs: {line}" for line in judge.uneven[:1]]
    return [*([BLAMED] if judge.loss_doubts else []), *padding]


def _gpus(sets: list[list[str]], cluster: Cluster) -> list[str]:
    """Name the models of the GPUs in these device sets."""
    models = {f"cuda:{gpu['index']}": str(gpu["name"]) for gpu in cluster.gpus}
    return [models.get(device, "") for chosen in sets for device in chosen]


def _certificate(against: Path | str | None, exactness: str) -> Mapping[str, Any] | None:
    if against is None:
        return None
    if exactness != "bits":
        raise UsageError(
            f"against={str(against)!r} at exactness {exactness!r}", "only bits can be checked so"
        )
    found = Proof.load(Path(against)).certificate
    if found is None:
        raise UsageError(f"{against} holds no certificate", "a proof of exactness bits is needed")
    return found


def draw(parts: Parts, steps: int, most: int) -> list[tuple[int, Indices]]:
    """Choose the batches of a proof, as (epoch, global data set indices).

    They follow the order of training. Where all of ``most`` shares would be equal, the last batch loses a
    sample: equal shares hide wrong weights.
    """
    batches: list[tuple[int, Indices]] = []
    epoch = 0
    while len(batches) < steps:
        there = parts.order.steps(epoch)
        assert there is not None
        for step in range(min(there, steps - len(batches))):
            batches.append((epoch, parts.order.batch(epoch, step)))
        epoch += 1
    if most > 1 and all(len(indices) % most == 0 for _, indices in batches):
        last_epoch, indices = batches[-1]
        batches[-1] = last_epoch, indices[:-1]
    return batches


def _row(case: Case, judge: Judge, text: str, chosen: list[str], level: str, run: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "strategy": text,
        "devices": len(chosen),
        "device_set": chosen,
        "level": level,
        "equal": "skipped",
        "reason": "",
        "max_ulps": None,
        "max_abs_diff": None,
        "first_difference": None,
        "shares": None,
        "tensors": 0,
        "step_kind": None,
    }
    try:
        layout = fit(text, len(chosen), device_type(chosen[0]))
    except UsageError as error:
        return {**row, "reason": str(error)}
    row["strategy"] = title(layout) if layout else text
    largest = max(len(indices) for _, indices in case.batches)
    try:
        check_level(layout, level, case.shards)
        if level == "bits" and torch.device(chosen[0]).type != case.home.type:
            raise RefusedError(
                f"bits of {chosen[0]} against {case.home}", "bits hold within one kind of device"
            )
        check_model(case.job, case.model, layout, level, largest, case.shards)
    except RefusedError as error:
        return {**row, "equal": "refused", "reason": str(error)}
    where = Place(
        choose(chosen, text, level, case.shards, case.step_kind, case.settings), rank_threads(chosen), None
    )
    try:
        return {**row, **judge.compare(layout, lambda spec: run(where, spec))}
    except OutOfMemoryError:
        # It says nothing about what was to be proved.
        raise
    except KwayError as error:
        return {**row, "equal": "no", "reason": str(error)}


def run_rank(
    context: Any, spec: candidate.CandidateSpec, model: torch.nn.Module | None = None
) -> dict[str, Any]:
    """Run one rank of a candidate. The task that ``prove`` sends."""
    return candidate.run(context.world, spec, model)


def _holds(rows: list[dict[str, Any]], strategies: list[str]) -> bool:
    """Whether no row failed, every count that fits is proved, and each strategy on several devices where asked."""
    if any(row["equal"] in ("no", "refused") for row in rows):
        return False
    proved = [row for row in rows if row["equal"] in ("bits", "ulps")]
    several = any(row["devices"] > 1 for row in rows)
    per_strategy = len(rows) // len(strategies)
    for place in range(len(strategies)):
        own = rows[place * per_strategy : (place + 1) * per_strategy]
        if not any(row in proved and (row["devices"] > 1 or not several) for row in own):
            return False
    return True
