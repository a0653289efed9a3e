"""``kway.prove``: compares k devices with one, tensor by tensor."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kway.data.loader import cut
from kway.data.order import Indices
from kway.data.parts import Parts
from kway.devices.cpu import threads_for
from kway.devices.select import parse_list
from kway.devices.topology import discover
from kway.errors import KwayError, RefusedError, UsageError
from kway.job import Job
from kway.jobs.folder import claimed
from kway.jobs.place import Place, choose
from kway.launch.torchrun import from_environment
from kway.proving import candidate
from kway.proving.compare import EPSILONS, NOISE_FACTOR, Comparison
from kway.proving.quiet import without_dropout
from kway.proving.reference import Reference, Snapshot
from kway.records import Proof
from kway.step.build import build
from kway.step.precision import precision_of
from kway.step.storage import read_tensors, to_bytes
from kway.strategies.layout import check_level, check_model, fit, named_sizes, title
from kway.training.loop import training_parts
from kway.training.spec import positive

OTHER_ORDERS = 3


def prove(
    job: Job,
    *,
    devices: Any = "auto",
    strategy: str = "data",
    exactness: str = "math",
    steps: int = 3,
    out: Path | str | None = None,
    precision: str | None = "fp64",
    own_optimizer: bool = False,
    echo: bool = True,
    ranks: Any = None,
) -> Proof:
    """Compare every tensor of ``steps`` optimizer steps on each device set with a plain loop on one device.

    ``devices``: one set or a list of sets (``"1,2,3"``, ``"cpu:2 cuda:0,1"``); ``strategy``: one or several,
    separated by commas; every pair is a row of the proof. Runs in float64 and with SGD (lr 0.1, momentum 0.9)
    unless ``precision`` is ``None`` or another, or ``own_optimizer`` is set: adaptive optimizers hide wrong
    factors. Dropout is off. Writes proof.json into ``out``.

    Raises ``UsageError`` before anything starts.
    """
    positive("steps", steps)
    if from_environment() is not None:
        raise UsageError("a proof inside ranks that are already there", "it starts its own", "run it outside")
    cluster = discover()
    job = replace(job, precision=precision or job.precision)
    if not own_optimizer:
        job = replace(job, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    strategies = [text.strip() for text in strategy.split(",")]
    for text in strategies:
        named_sizes(text)
        check_level({}, exactness)
    sets = parse_list(devices, cluster)
    parts, _ = training_parts(job)
    # The reference trains and casts it: an instance stays as the user has it.
    model = copy.deepcopy(build(job))
    batches = draw(parts, steps, max(len(chosen) for chosen in sets))
    home = torch.device("cuda", 0) if sets[0][0].startswith("cuda") else torch.device("cpu")
    notices = list(parts.notices)
    rows: list[dict[str, Any]] = []
    with claimed(out, "proof.json") as folder, claimed(None, "before") as scratch:
        with without_dropout(model) as silenced, precision_of(job.precision).flags():
            reference = Reference(job, model, home)
            orders = _orders(parts, batches, job.seed)
            snapshots = [
                _kept(snapshot, scratch, step) for step, snapshot in enumerate(reference.steps(orders))
            ]
        if silenced:
            notices.append(f"dropout is off in a proof: {', '.join(silenced)}")
        for text in strategies:
            for chosen in sets:
                rows.append(
                    _row(job, parts, model, text, chosen, exactness, batches, snapshots, scratch, echo, ranks)
                )
        proof = Proof(
            model=job.title,
            reference={
                "loop": "plain torch on one device, whole batches",
                "device": str(home),
                "rule": f"largest difference at most {NOISE_FACTOR} times the reference's own noise, or {EPSILONS} "
                "eps times the tensor's largest magnitude",
                "orders": OTHER_ORDERS + 1,
                "losses": [float(snapshot.after["loss"]) for snapshot in snapshots],
            },
            verdict="pass" if _holds(rows, strategies) else "fail",
            batch_size=max(len(indices) for _, indices in batches),
            precision=job.precision,
            steps=steps,
            candidates=rows,
            notices=list(dict.fromkeys(notices)),
        )
        if out is not None:
            proof.save(folder)
    return proof


def draw(parts: Parts, steps: int, most: int) -> list[tuple[int, Indices]]:
    """Choose the batches of a proof, as (epoch, global data set indices).

    They follow the order of training. Where all shares would be equal, the last batch loses a sample: equal
    shares hide wrong weights.
    """
    batches: list[tuple[int, Indices]] = []
    epoch = 0
    while len(batches) < steps:
        for step in range(min(parts.order.steps(epoch), steps - len(batches))):
            batches.append((epoch, parts.order.batch(epoch, step)))
        epoch += 1
    if most > 1 and all(len(indices) % most == 0 for _, indices in batches):
        last_epoch, indices = batches[-1]
        batches[-1] = last_epoch, indices[:-1]
    return batches


def _orders(parts: Parts, batches: list[tuple[int, Indices]], seed: int) -> Iterator[Sequence[Any]]:
    """Yield each batch as it is and with its samples in three other orders: reversed, and shuffled twice."""
    shuffle = np.random.Generator(np.random.Philox(seed))
    for step, (epoch, indices) in enumerate(batches):
        others = [indices[::-1], *(shuffle.permutation(indices) for _ in range(OTHER_ORDERS - 1))]
        yield [
            cut(parts, np.ascontiguousarray(own), epoch=epoch, step=step, rank=0, size=1, seed=seed).micro[0][
                0
            ]
            for own in (indices, *others)
        ]


def _kept(snapshot: Snapshot, scratch: Path, step: int) -> Snapshot:
    """Put the state before a step where candidates find it, and keep the rest."""
    candidate.before_file(scratch, step).write_bytes(to_bytes(snapshot.before))
    return replace(snapshot, before={})


def _row(
    job: Job,
    parts: Parts,
    model: torch.nn.Module,
    text: str,
    chosen: list[str],
    level: str,
    batches: list[tuple[int, Indices]],
    snapshots: list[Snapshot],
    scratch: Path,
    echo: bool,
    ranks: Any,
) -> dict[str, Any]:
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
    }
    try:
        layout = fit(text, len(chosen))
    except UsageError as error:
        return {**row, "reason": str(error)}
    row["strategy"] = title(layout) if layout else text
    largest = max(len(indices) for _, indices in batches)
    try:
        check_level(layout, level)
        check_model(job, model, layout, level, largest)
    except RefusedError as error:
        return {**row, "equal": "refused", "reason": str(error)}
    spec = candidate.CandidateSpec(job, parts, layout, level, str(scratch), batches)
    threads = threads_for(len(chosen) if chosen[0] == "cpu" else 1)
    where = Place(choose(chosen, text, level), threads, None)
    own = [] if where.starts_ranks else [_fresh(job, model, scratch)]
    try:
        result = where.run(run_rank, spec, *own, echo=echo, ranks=ranks)[0]
    except KwayError as error:
        return {**row, "equal": "no", "reason": str(error)}
    comparison = Comparison()
    for step, snapshot in enumerate(snapshots):
        got = read_tensors(candidate.after_file(scratch, step))
        stray = result["strays"][step]
        comparison.add(step + 1, snapshot, got)
        if stray is not None:
            comparison.fail(step + 1, stray[1], f"{stray[1]} of rank {stray[0]} is not that of rank 0")
    return {
        **row,
        "equal": comparison.equal,
        "reason": comparison.reason,
        "max_ulps": round(comparison.max_ulps, 1),
        "max_abs_diff": comparison.max_abs_diff,
        "first_difference": comparison.first_difference,
        "shares": result["shares"],
        "tensors": comparison.tensors,
        "noise_only": sorted(comparison.noise_only),
    }


def _fresh(job: Job, model: torch.nn.Module, scratch: Path) -> torch.nn.Module:
    """Put the reference's module back to the state before the first step, for the one-device candidate."""
    before = read_tensors(candidate.before_file(scratch, 0))
    model.load_state_dict({n.removeprefix("model/"): v for n, v in before.items() if n.startswith("model/")})
    return model


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
