"""What helps where memory ran out, with the numbers that were measured."""

from collections.abc import Callable
from dataclasses import dataclass

from kway.units import bytes_text, counted

# Of the room that is left for activations this much is counted on: memory is given in pieces, and pieces do not fit.
_USED = 0.9
_HALF = ("fp32", "tf32", "fp64")


@dataclass(frozen=True)
class Situation:
    """Where it ran out. ``samples``: the most that were computed at once, of ``total`` of the global batch.

    ``level`` with ``shards`` of a batch; ``trains``: whether steps are taken; ``why_whole``: returns why a share must
    not be cut in time, if so. ``adapts``: whether whoever runs the job can; ``blocks``: how many blocks of the model
    could be computed again in backward, and are not; ``recomputes``: whether some are; ``shared``: whether all devices
    have one memory. ``fixed``: bytes that do not depend on samples; ``activations``: bytes that do, measured
    with what was asked for; ``room``: bytes that tensors can take in all; ``None`` where nobody knows.
    """

    phase: str
    samples: int
    total: int
    level: str
    shards: int
    precision: str
    trains: bool
    why_whole: Callable[[], str | None]
    adapts: bool = False
    blocks: int = 0
    recomputes: bool = False
    shared: bool = False
    fixed: int = 0
    activations: int | None = None
    room: int = 0

    @property
    def fits(self) -> int | None:
        """How many samples at once fit: of what is left, by what one of them needed until it failed. At most half."""
        if not self.activations or self.samples < 2:
            return None
        each = self.activations / self.samples
        most = int(_USED * (self.room - self.fixed) / each)
        # A pass that failed on its way would have needed more than was measured.
        return max(0, min(most, self.samples // 2))


def advice(now: Situation) -> list[str]:
    """Return what to do, one line each, what changes least first."""
    if now.phase == "update":
        return [
            "the optimizer's step needs room beside weights, gradients and its state, however few samples are computed "
            "at once: take an optimizer with less state (SGD), or foreach=False in its options, which computes "
            "parameter by parameter",
            "fewer parameters, or a device with more memory",
        ]
    if now.phase in ("start", "reduction"):
        return [
            "what does not fit is as large as the model, however few samples are computed at once: a smaller model, "
            "or a device with more memory"
        ]
    if now.phase == "input":
        return [
            "what is read is as large as a share of the global batch, and as what the data set keeps, however few "
            "samples are computed at once: more devices, fewer workers, a data set that reads what is asked for, or a "
            "smaller batch_size"
        ]
    if now.phase == "reference":
        return [
            "the reference is one device that computes whole batches in plain torch, and keeps their results: a "
            "smaller batch_size (--batch-size) proves the same"
        ]
    if not now.trains:
        return [
            f"a smaller batch_size (here {counted(now.total, 'sample')} over all devices)",
            "more devices",
        ]
    return [*_fewer_at_once(now), *_other_ways(now)]


def _fewer_at_once(now: Situation) -> list[str]:
    if now.samples < 2:
        return ["no fewer samples can be computed at once than 1"]
    half, fits = now.samples // 2, now.fits
    if now.level == "bits":
        # The shards are the micro-batches; others give other bits.
        return [
            f"more shards: shards={2 * now.shards} (--shards {2 * now.shards}) computes {half} at once; the bits are "
            "those of another number of shards"
        ]
    reason = now.why_whole()
    if reason is not None:
        return [f"not fewer samples at once (micro_batch), which would be another result: {reason}"]
    if fits == 0:
        return [
            "weights, gradients, optimizer and input alone leave no room for a sample: micro_batch=1 (--micro-batch 1) "
            f"may still fail ({bytes_text(now.fixed)} of {bytes_text(now.room)})"
        ]
    chosen = fits or half
    text = f"micro_batch={chosen} (--micro-batch {chosen}): the same global batch, {chosen} samples at once"
    if now.activations is not None:
        each = bytes_text(now.activations // now.samples)
        text += f"; by {each} a sample until it failed, so that still fewer may be needed"
    else:
        text += ", half as many as now"
    return [text, *(["on_oom='adapt' (--on-oom adapt) tries half as many by itself"] if now.adapts else [])]


def _other_ways(now: Situation) -> list[str]:
    ways = []
    # A share of one sample is as small as it can be, and what one at a time takes is not of the rest of the batch.
    smaller = now.samples > 1
    if smaller and not now.shared:
        ways.append("more devices, each with a smaller share of the same global batch")
    ways.append(_checkpointing(now))
    if now.precision in _HALF:
        ways.append(
            "precision='bf16' (--precision bf16): most activations take "
            + ("a quarter" if now.precision == "fp64" else "half")
        )
    ways.append(
        f"a smaller global batch (batch_size, here {now.total:,}), which gives another result"
        if smaller
        else "a smaller model, smaller samples, or a device with more memory"
    )
    return ways


def _checkpointing(now: Situation) -> str:
    if now.recomputes:
        return "activation checkpointing within the blocks, which keep their inputs alone (torch.utils.checkpoint)"
    text = "activation checkpointing: activations are computed again in backward instead of being kept; "
    if not now.blocks:
        return f"{text}in the model (torch.utils.checkpoint)"
    blocks = counted(now.blocks, "block")
    text += f"of the model's {blocks} by settings={{'recompute': True}} (--settings recompute=true)"
    if now.adapts and now.blocks and (now.level == "bits" or now.why_whole() is not None):
        text += "; on_oom='adapt' (--on-oom adapt) does so"
    return text
