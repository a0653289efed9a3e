"""What lies in the memory of one device while a step is taken, by part."""

from dataclasses import dataclass

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


def memory_of(
    workload: Workload, step_kind: str, samples: float, recompute: bool = False
) -> dict[str, float]:
    """Return bytes by part on one device that takes a step over ``samples`` samples with all of the model.

    Activations: a fixed part and so many bytes a sample, by what autograd kept in a real step. ``recompute``: with
    activation checkpointing, where that was measured. What the allocator had at its peak beyond the parts that have a
    name is its margin (blocks are rounded up, and what is free lies in pieces); nothing where no peak was measured.
    """
    held = workload.memory
    each = held["activation_bytes_per_sample"]
    less = held["checkpointed_activation_bytes_per_sample"]
    if recompute and less is not None:
        each = less
    parts: dict[str, float] = {
        **states_of(workload).on_each(),
        "buffers": workload.parameters["buffer_bytes"],
        "activations": held["activation_fixed_bytes"] + each * samples,
        "workspace": held["workspace_bytes"],
    }
    kept = sum(parts.values()) - each * samples
    parts["allocator"] = 0.0 if recompute else margin_of(workload, step_kind, samples, kept, each)
    return parts


def margin_of(workload: Workload, step_kind: str, samples: float, fixed: float, each: float) -> float:
    """Return by how many bytes a step's peak is above ``fixed`` and ``each`` a sample: what has no name.

    Between two measured shares on a line, beyond them that of the nearest one, so that more samples never take less.
    """
    peaks = [peak for peak in workload.memory["peak"] if peak["step_kind"] == step_kind]
    points = sorted(
        (peak["samples"], max(0.0, peak["bytes"] - fixed - each * peak["samples"])) for peak in peaks
    )
    if not points:
        return 0.0
    return between(points, min(max(samples, points[0][0]), points[-1][0]))
