"""Checkpoints of small snapshots on disk."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoints.snapshots import snapshot

from kway.checkpoints.saving import write_checkpoint
from kway.checkpoints.snapshot import freeze


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint of a step into ``tmp_path / "checkpoints"`` at once, and returns its folder."""

    def write(step: int, **parts: object) -> Path:
        return write_checkpoint(tmp_path / "checkpoints", freeze(snapshot(step, **parts), {}))

    return write
