"""What it costs that devices share a batch: sums of gradients, and what the level wants of them beside."""

import math

from kway.cost.collectives import ALL_GATHER, ALL_REDUCE, ORDERED
from kway.cost.curve import between, rising
from kway.cost.estimate import COMPUTE, LAUNCH, Estimate
from kway.cost.memory import gradients_at_peak
from kway.cost.overlap import complete_at, cut, exposed_s, slowdown_of
from kway.errors import NotMeasuredError

STATISTICS, BESIDE_GRADIENTS, THREADS = (
    "batch statistics",
    "numbers beside gradients",
    "gather and scatter (threads)",
)
LAID_DOWN = "gradients for the other threads"
TURNS = "turns of the interpreter (threads)"
BITS = "bits"


def add_gradient_sums(estimate: Estimate, ranks: int, bucket_bytes: float, hides: bool) -> None:
    """Add what ``ranks`` processes send each other in a step of data parallelism.

    The buckets that they hold lie among their gradients already: see ``kway.cost.memory.gradients_at_peak``.

    Gradients are summed in buckets of ``bucket_bytes``, each by an all-reduce (an ordered tree reduction at level
    bits); where a step ``hides`` them, all but the last go on beside backward: see ``exposed_s``. A step whose forward
    or backward pass has collectives of its own hides nothing: what is sent ahead would come between them
    (``kway.step.share``). Those come on top, each as often as it is called, and none of them is hidden, since what
    follows needs the result. Raises ``NotMeasuredError``.
    """
    if ranks < 2:
        return
    workload = estimate.workload
    ordered = workload.level == BITS
    size = workload.parameters["gradient_bytes"]
    buckets = (
        cut(size, bucket_bytes, workload.layers) if ordered or not workload.buckets else workload.buckets
    )
    for each in workload.collectives:
        # Sizes are those of the larger buffer: what all give, where each gets all of it.
        scale = ranks if each["what"] == ALL_GATHER else 1
        within = STATISTICS if each["when"] != "step" else BESIDE_GRADIENTS
        seconds = each["times"] * estimate.collective_s(each["what"], ranks, scale * each["bytes"])
        estimate.add(f"{within} ({each['what']})", seconds)
    talks = any(each["when"] != "step" for each in workload.collectives)
    name = ORDERED if ordered else ALL_REDUCE
    reductions = [estimate.collective_s(name, ranks, bucket) for bucket in buckets]
    # At level bits only the last of a device's shards can hide anything.
    backward = estimate.part_s("backward") / (-(-estimate.shards // ranks) if ordered else 1)
    if hides and not talks and len(buckets) > 1:
        ready = complete_at(buckets, workload.layers, estimate.samples)
        slowdown = slowdown_of(estimate.measurements, max(buckets))
        estimate.add(name, exposed_s(list(zip(reductions, ready, strict=True)), backward, slowdown))
    else:
        estimate.add(name, sum(reductions))


def add_thread_sums(estimate: Estimate, replicas: int) -> None:
    """Add what replicas in the threads of one process cost each other, and the vectors that they lay down.

    Sums go through memory (``kway.comm.threads``): a replica copies its gradients, adds up one of ``replicas``
    slices of them all, and copies the others' slices: three copies of their bytes between the devices, as measured. Of
    each other collective it reads what all have laid down, one copy of ``replicas`` times the bytes. Python runs in one
    thread at a time (CPython's global interpreter lock): a step is no shorter than what all
    replicas take to start their operations, one after the other. Raises ``NotMeasuredError``.
    """
    if replicas < 2:
        return
    size = estimate.workload.parameters["gradient_bytes"]
    passed = 3 * copied_s(estimate, size)
    for each in estimate.workload.collectives:
        passed += each["times"] * copied_s(estimate, replicas * each["bytes"])
    estimate.add(THREADS, passed)
    starts, own = estimate.terms.get(LAUNCH, 0.0), estimate.terms.get(COMPUTE, 0.0)
    estimate.add(TURNS, max(0.0, replicas * starts - (starts + own)))
    # Until all have read them, what a replica lays down for the others is a third one of its gradients.
    kept = estimate.memory.get("activations", 0.0)
    estimate.hold(LAID_DOWN, gradients_at_peak(size, kept, copies=2) - gradients_at_peak(size, kept))


def copied_s(estimate: Estimate, size: float) -> float:
    """Return the seconds of a copy of so many bytes from one of the devices to the next.

    Between two measured sizes a straight line of the logarithms, below them the time of the smallest, which is latency,
    beyond them the rate of the largest. More bytes never cost less.
    Raises ``NotMeasuredError`` where no copy between devices of this kind was measured.
    """
    first, *others = estimate.devices
    second = next((device for device in others if device != first), first)
    figures = [] if estimate.measurements is None else estimate.measurements.find("copies", "copy", to=second)
    points = [
        (figure["parameters"]["bytes"], figure["parameters"]["bytes"] / figure["value"])
        for figure in figures
        if figure["parameters"].get("from") == first and figure["value"] > 0
    ]
    if not points:
        raise NotMeasuredError(
            f"the time of a copy from {first} to {second}",
            "it was not measured here",
            "kway measure --only copies",
        )
    curve = rising(points)
    largest, slowest = curve[-1]
    return slowest * size / largest if size > largest else between(curve, max(size, curve[0][0]), math.log)
