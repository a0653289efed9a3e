"""Whether ranks that something else started are to train the same: each was told by a script or command of its own."""

import zlib
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from kway.comm.group import Group
from kway.data.arrays import InMemory
from kway.data.parts import Parts
from kway.errors import UsageError
from kway.jobs.place import Place
from kway.launch.in_time import ends_in_time
from kway.training.facts import named
from kway.training.spec import TrainSpec

# Samples of data in memory that are compared: a rank with another set differs in its first, last or middle one.
_LOOKED_AT = 3


def check_alike(where: Place, spec: TrainSpec, train: Parts, held: Parts | None) -> TrainSpec:
    """Return ``spec``. A collective. Raises ``UsageError``, on every rank, where one is to train something else than
    rank 0.

    Ranks that differ would wait for each other in vain, or train on together with half of what each was told.
    """
    if where.joined is None or where.joined.size == 1:
        return spec
    with ends_in_time(where.joined):
        said = Group(where.joined.rank, where.joined.size).objects(asked(spec, train, held))
    for rank, other in enumerate(said):
        differ = [name for name in {**said[0], **other} if said[0].get(name) != other.get(name)]
        if differ:
            raise UsageError(
                "; ".join(
                    f"{name} {other.get(name)} on rank {rank}, {said[0].get(name)} on rank 0"
                    for name in differ
                ),
                "the ranks of a run train one job, and each was told by its own command line or script",
                "start them all with the same one; another run's ranks meet at another address",
            )
    return spec


def asked(spec: TrainSpec, train: Parts, held: Parts | None) -> dict[str, Any]:
    """Return in plain values what decides which steps a rank takes, and at which of them it meets the others."""
    job = spec.job
    return {
        **{name: value for name, value in spec.facts.items() if name not in ("frozen", "code")},
        "frozen parameters": len(spec.facts["frozen"]),
        "optimizer": named(job.optimizer),
        "epochs": spec.epochs,
        "steps": spec.steps,
        "exactness": spec.plan.exactness,
        "layout": spec.plan.layout,
        "step kind": spec.plan.step_kind,
        "settings": spec.plan.settings,
        "micro_batch": job.micro_batch,
        "metrics": sorted(job.metrics),
        "data": _data(train),
        "validation": None if held is None else _data(held),
        "validate_every": spec.validate_every,
        "log_every": spec.log_every,
        "checkpoint_every": spec.checkpoint_every,
        "save_best": spec.save_best,
        "early_stop": spec.early_stop,
        "timeline": spec.timeline,
    }


def _data(parts: Parts) -> str:
    """Name a data set, by some of its samples where asking for them changes nothing."""
    kind, data = type(parts.dataset).__name__, parts.dataset
    if not isinstance(data, InMemory):
        return kind
    count = len(data)
    places = np.linspace(0, count - 1, _LOOKED_AT).astype(np.int64) if count else np.zeros(0, dtype=np.int64)
    digest = 0
    for leaf in tree_leaves(data.take(places)):
        if isinstance(leaf, torch.Tensor):
            digest = zlib.crc32(leaf.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes(), digest)
    return f"{kind} of {count:,} samples, digest {digest:08x}"
