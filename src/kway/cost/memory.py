"""What lies in the memory of one device while a step is taken, by part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kway.cost.compute import RECORDS
from kway.cost.curve import between
from kway.workload import Workload

# Of one parameter: bytes of a number, by the way it is trained (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
# Training Trillion Parameter Models", 2020, section 3.1, for Adam in mixed precision).
FP32, HALF, ADAM, MOMENTUM, MASTER = 4, 2, 8, 4, 4
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"


@dataclass(frozen=True)
class States:
    """Bytes of what a model is trained by, each tensor counted once: tied weights are one.

    ``weights`` of all parameters; ``gradients``, ``optimizer`` and ``master`` (a wider copy of the weights, where the
    optimizer holds one) of those that are trained.
    """

    weights: int
    gradients: int
    optimizer: int
    master: int = 0

    @classmethod
    def of(
        cls,
        trained: int,
        frozen: int = 0,
        *,
        width: int = FP32,
        gradient_width: int = FP32,
        optimizer_width: int = ADAM,
        master_width: int = 0,
    ) -> "States":
        """Return the states of so many numbers, by bytes a number: 16 with Adam in fp32, 4 for one that is frozen."""
        return cls(
            width * (trained + frozen),
            gradient_width * trained,
            optimizer_width * trained,
            master_width * trained,
        )

    def on_each(self, ranks: int = 1, sharded: frozenset[str] = frozenset()) -> dict[str, int]:
        """Return bytes by part on each of ``ranks`` devices, where what ``sharded`` names is split over them.

        Shards are padded to equal sizes: none is smaller than a ``ranks``-th. A master copy goes with the optimizer.
        (ZeRO's stages: ``optimizer``; with ``gradients``; with ``weights``.)
        """
        parts = {WEIGHTS: self.weights, GRADIENTS: self.gradients, OPTIMIZER: self.optimizer + self.master}
        return {name: -(-size // ranks) if name in sharded else size for name, size in parts.items()}


def states_of(workload: Workload) -> States:
    """Return the states of a workload, as they were measured in a real step."""
    sizes = workload.parameters
    return States(sizes["bytes"], sizes["gradient_bytes"], sizes["optimizer_bytes"])


def gradients_at_peak(size: float, activations: float, kept: float = 0.0, copies: int = 1) -> float:
    """Return the bytes of gradients beside ``activations`` at the moment at which a step holds most.

    A step begins without gradients (``kway.step.core``). Forward fills the activations, all of which are there when it
    ends; backward lets go of them while it makes the gradients, all of which, ``size`` bytes, are there when it ends.
    So these two take max(activations, size), and not their sum. ``kept``: what devices keep from step to step to add
    gradients up (``kway.comm.flat``): vectors, whose views are the gradients once they are added up, and count once.
    Only from backward to then are both there, what backward made and the vectors: ``copies`` is what else there is of
    all gradients by that time, beside the vectors. Hence kept + max(activations, copies x size), of which the
    activations have a part of their own.

    On the way through backward it can be more, where the layers that it reaches first have the most parameters and
    keep the least: a measured peak shows it, and it is the allocator's part.
    """
    return kept + max(0.0, copies * size - activations)


def flat_bytes(
    parameters: Mapping[str, Any], memory: Mapping[str, Any], buckets: Sequence[int], level: str
) -> tuple[int, int]:
    """Return the bytes that one of several devices keeps to add gradients up, and more that it does in its first steps.

    The arguments are fields of ``Workload``. On GPUs large gradients lie in no vector (``kway.comm.apart``), but where
    there are several buckets the first steps copy them. Where nobody looked, all gradients lie in vectors, with the few
    numbers that travel with them.
    """
    if memory.get("vector_bytes") is not None:
        return int(memory["vector_bytes"]), int(memory.get("first_copies_bytes") or 0)
    # At level bits a bucket is sent in slices, which do not tell its size.
    counted = 0 if level == "bits" else sum(buckets)
    return counted or int(parameters["gradient_bytes"]), 0


def memory_of(
    workload: Workload, step_kind: str, samples: float, recompute: bool = False, several: bool = False
) -> dict[str, float]:
    """Return bytes by part on one device that takes steps over ``samples`` samples with all of the model.

    Activations: a fixed part and so many bytes a sample, by what autograd kept in a real step. ``recompute``: with
    activation checkpointing, where that was measured. ``several``: as one of several devices, which keeps vectors for
    its gradients, and in its first steps copies: see ``flat_bytes``. What the peak was beyond the parts that have a
    name is workspace, up to the most that was seen, and beyond that the allocator's margin (blocks are rounded up, and
    what is free lies in pieces); where no peak was measured the most workspace, and no margin.
    """
    held = workload.memory
    each = held["activation_bytes_per_sample"]
    less = held["checkpointed_activation_bytes_per_sample"]
    if recompute and less is not None:
        each = less
    activations = held["activation_fixed_bytes"] + each * samples
    parts: dict[str, float] = {
        **states_of(workload).on_each(),
        "buffers": workload.parameters["buffer_bytes"],
        "activations": activations,
    }
    # Nobody takes the later steps who has no room for the first ones.
    kept = sum(_flat(workload, several))
    parts[GRADIENTS] = gradients_at_peak(workload.parameters["gradient_bytes"], activations, kept)
    rest = None if recompute else beyond_parts(workload, step_kind, samples, several)
    most = float(held["workspace_bytes"])
    if rest is not None and rest < 0:
        # Compiled code keeps less for backward than operations one by one, of which the activations were measured.
        parts["activations"] += rest
        rest = 0.0
    parts["workspace"] = most if rest is None else min(most, rest)
    parts["allocator"] = 0.0 if rest is None else rest - parts["workspace"]
    return parts


def beyond_parts(workload: Workload, step_kind: str, samples: float, several: bool = False) -> float | None:
    """Return by how many bytes a step's peak is above what weights, gradients, optimizer, buffers and activations take,
    below 0 where it keeps less than these.

    By the peaks of one of ``several`` devices, whose vectors of gradients are in them, or of one alone; where there are
    only the others, by those. Those of a recorded kind have the steps before and the recording itself in them
    (``Sitting.warm``); where there are none, those of the kind that it records count. Between two measured shares on a
    line, beyond them that of the nearest one, so that more samples never take less. What compiled code keeps less goes
    down with the samples below the smallest measured share, and stays as it is above the largest one, where it keeps
    less still: that is the cautious side, on purpose. ``None`` where no peak is known.
    """
    kinds = (step_kind, *([RECORDS[step_kind], "eager"] if step_kind in RECORDS else []))
    found = next(filter(None, (_largest(workload, kind, several) for kind in kinds)), None)
    if found is None:
        return None
    points = sorted(found.items())
    least, beyond = points[0]
    if samples < least and beyond < 0:
        # What compiled code does not keep it does not keep of each sample.
        return beyond * samples / least
    return between(points, min(max(samples, least), points[-1][0]))


def _largest(workload: Workload, step_kind: str, several: bool) -> dict[int, float]:
    """Return by how many bytes the peaks of a kind are above the named parts, by samples; those of one of ``several``
    devices, or of one alone, where there are any.

    Of several numbers of devices with a share the largest: which one it is does not matter to the share.
    """
    peaks = [peak for peak in workload.memory["peak"] if peak["step_kind"] == step_kind]
    found: dict[int, float] = {}
    for peak in [peak for peak in peaks if (peak["devices"] > 1) == several] or peaks:
        vectors, _ = _flat(workload, peak["devices"] > 1)
        named = named_bytes(workload.parameters, workload.memory, peak["samples"], vectors)
        beyond = peak["bytes"] - named
        found[peak["samples"]] = max(found.get(peak["samples"], beyond), beyond)
    return found


def named_bytes(
    parameters: Mapping[str, Any], memory: Mapping[str, Any], samples: float, kept: float = 0.0
) -> float:
    """Return what all parts of a step take that have a name of their own, at its peak.

    ``parameters``, ``memory``: fields of ``Workload``; ``kept``: as for ``gradients_at_peak``.
    """
    activations = memory["activation_fixed_bytes"] + memory["activation_bytes_per_sample"] * samples
    states = parameters["bytes"] + parameters["optimizer_bytes"] + parameters["buffer_bytes"]
    return float(states + activations + gradients_at_peak(parameters["gradient_bytes"], activations, kept))


def _flat(workload: Workload, several: bool) -> tuple[int, int]:
    if not several:
        return 0, 0
    return flat_bytes(workload.parameters, workload.memory, workload.buckets, workload.level)
