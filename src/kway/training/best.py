"""The best weights of a run that goes on in another folder."""

import hashlib
from pathlib import Path

from kway.checkpoints.reading import Checkpoint
from kway.records import write_atomically
from kway.training.validation import BEST


def bring_best(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Copy the best weights of the run that a checkpoint is of into the folder of this run, if they are those that the
    checkpoint speaks of. Returns lines for the user.
    """
    validation = checkpoint.part("run").get("validation") or {}
    best = validation.get("best")
    if best is None or (folder / BEST).exists():
        return []
    source = checkpoint.path.resolve().parent.parent / BEST
    try:
        content = source.read_bytes()
    except OSError:
        content = b""
    if hashlib.sha256(content).hexdigest() == validation.get("best_sha256"):
        write_atomically(folder / BEST, content)
        return []
    return [
        f"the best weights up to then, of step {best['step']}, are not in {source} any more: best begins anew"
    ]
