"""Whether a share may be computed in smaller parts than now without another result."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kway.errors import RefusedError
from kway.job import Job
from kway.strategies.layout import axes
from kway.strategies.levels import level_of


def shares_of(layout: Mapping[str, int]) -> int:
    """Return into how many shares a layout cuts a global batch."""
    known = axes()
    return prod(size for axis, size in layout.items() if known[axis].splits_batch)


def why_whole(
    job: Job, model: nn.Module, layout: Mapping[str, int], level: str, batch_size: int, shards: int
) -> str | None:
    """Return why a device must not compute fewer samples at once than now at this level, or ``None``.

    Some models show only in their first step that a batch must not be cut: the step refuses it then.
    """
    shares = shares_of(layout)
    share = -(-batch_size // shares)
    try:
        level_of(level).check(replace(job, micro_batch=1), model, shares, share, shards)
    except RefusedError as refused:
        return f"{refused.need} ({refused.got})"
    if level_of(level).global_statistics or share == 1:
        return None
    # Who names a micro_batch at level loose asks for what follows from it. Nobody else does.
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            return (
                f"layer {name!r} would normalise by the statistics of a micro-batch in place of those of a device's "
                f"share (level {level})"
            )
    moving = next((name for name, _ in model.named_buffers()), None)
    if moving is None:
        return None
    return f"buffer {moving!r} may move with every micro-batch (level {level}; at math it moves once a step)"
