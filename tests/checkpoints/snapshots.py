"""Small snapshots whose numbers say of which step they are."""

import torch

from kway.checkpoints.snapshot import Snapshot


def snapshot(step: int, size: int = 3, **parts: object) -> Snapshot:
    """Every number in it is ``step``, so that a mixture of two is noticed."""
    weight = torch.full((2, size), float(step))
    state = {"optimizer": {"w": {"exp_avg": torch.full((size,), float(step)), "step": step}}}
    return Snapshot(step, step // 10, {"w": weight, "tied": weight}, {**state, **parts})
