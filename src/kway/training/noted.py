"""What may change when a run goes on, and is said: settings that keep the run's course, or change it within reason."""

from collections.abc import Mapping, Sequence
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
# Of a job's facts: what tells the user's code, by part, and the versions of Python and torch that it is of.
CODE, VERSIONS = "code", "versions"


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


def noted_changes(checkpoint: Checkpoint, now: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return lines for the user that say which of them are others than in the run of the checkpoint, and of which parts
    of the job (``facts``) the code is.
    """
    return [*_settings(checkpoint, now), *_code(checkpoint.part("job").get(CODE), facts.get(CODE))]


def _code(then: Any, now: Any) -> list[str]:
    """Say which code changed; not where another Python or torch, or an earlier kway, keeps that from being told."""
    if not isinstance(then, dict) or now is None or then.get(VERSIONS) != now[VERSIONS]:
        return []
    parts = [name for name, told in now.items() if name != VERSIONS and _changed(then.get(name), told)]
    if not parts:
        return []
    listed = f" and of {parts[-1]}" if len(parts) > 1 else ""
    return [
        f"the code of {', '.join(parts[:-1] or parts)}{listed} is not what it was when the checkpoint was written (or "
        "what it was made with is not): the run goes on with what there is now"
    ]


def _changed(then: Any, now: Sequence[str]) -> bool:
    if not (then and now):
        return False
    (home, code, shown), (home_now, code_now, shown_now) = then, now
    # A script is another module when it is run than when it is imported, and its code is told by that as well.
    return bool(shown != shown_now or (home == home_now and code != code_now))


def _settings(checkpoint: Checkpoint, now: Mapping[str, Any]) -> list[str]:
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
