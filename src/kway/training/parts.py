"""The data of a job: what it trains on, and what it holds out."""

from dataclasses import replace
from typing import Any

import torch

from kway.data.parts import Parts, take_apart
from kway.job import Job


def training_parts(job: Job) -> tuple[Parts, Parts | None]:
    """Take a job's data apart: (training, validation or ``None``). Raises ``UsageError`` and ``DataError``."""
    train = take_apart(
        job.data, batch_size=job.batch_size, seed=job.seed, shuffle=job.shuffle, workers=job.workers
    )
    if job.validation is None:
        return train, None
    held = take_apart(
        job.validation,
        batch_size=_own_batch(job.validation, train.order.batch_size),
        seed=job.seed,
        shuffle=False,
        workers=job.workers,
        every=True,
    )
    return train, replace(held, notices=[f"validation data: {text}" for text in held.notices])


def _own_batch(data: Any, default: int) -> int | None:
    return None if isinstance(data, torch.utils.data.DataLoader) else default
