"""What may change when a run goes on, and is said: settings that keep the run's course, or change it within reason."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn
from torch.utils._pytree import tree_leaves

from kway.checkpoints.reading import Checkpoint
from kway.data.arrays import InMemory
from kway.data.parts import Parts
from kway.job import Job
from kway.step.state import other_buffers
from kway.training.facts import digest
from kway.training.spec import TrainSpec
from kway.training.subject import data_text

_SEEN = 64


def noted_of(job: Job, model: nn.Module, held: Parts | None, spec: TrainSpec | None = None) -> dict[str, Any]:
    """Return these settings as plain values. ``model``: as it was built; ``held``: the validation data; ``spec``: of
    kway's own loop.
    """
    return {
        "micro_batch": job.micro_batch,
        "validation data": None if held is None else _held_text(job, held),
        "metrics": ", ".join(sorted(job.metrics)) or None,
        "buffers beside the weights": ", ".join(sorted(other_buffers(model))) or None,
        "save_best": None if spec is None else spec.save_best,
        "early_stop": None if spec is None else spec.early_stop,
        "patience": None if spec is None or spec.early_stop is None else spec.patience,
    }


def noted_changes(checkpoint: Checkpoint, now: Mapping[str, Any]) -> list[str]:
    """Return a line for the user that says which of them are others than in the run of the checkpoint, or none."""
    then = checkpoint.part("job").get("noted", now)
    differ = [f"{k} {_text(then.get(k))}, now {_text(now[k])}" for k in now if then.get(k) != now[k]]
    if not differ:
        return []
    line = f"goes on otherwise than up to step {checkpoint.step}: {'; '.join(differ)}"
    if then.get("micro_batch") != now["micro_batch"]:
        line += " (other micro-batches round otherwise, and draw other random numbers of the model, such as dropout)"
    return [line]


def _held_text(job: Job, held: Parts) -> str:
    text, count = data_text(job.validation), held.order.samples
    if count is not None:
        text = f"{count} of {text}"
    # Reading data in memory draws nothing and costs little; other data sets are not asked twice for a sample.
    if isinstance(held.dataset, InMemory) and count:
        chosen = np.linspace(0, count - 1, min(count, _SEEN)).astype(np.int64)
        text += f" ({' '.join(digest(leaf) for leaf in tree_leaves(held.dataset.take(chosen)))})"
    return text


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
