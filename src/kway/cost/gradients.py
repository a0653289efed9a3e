"""What it costs that devices share a batch: sums of gradients, and what the level wants of them beside."""

import math
from collections.abc import Sequence

from kway.cost.beside import LARGE, SMALL, slowdowns, thread_sum_s, turns_s
from kway.cost.beside import THREADS as MEASURED
from kway.cost.collectives import ALL_GATHER, ALL_REDUCE, ORDERED
from kway.cost.curve import between, rising
from kway.cost.estimate import COMPUTE, INPUT, LAUNCH, Estimate
from kway.cost.memory import gradients_at_peak
from kway.cost.overlap import complete_at, cut, exposed_s, slowdown_of
from kway.errors import NotMeasuredError

STATISTICS, BESIDE_GRADIENTS, THREADS = (
    "batch statistics",
    "numbers beside gradients",
    "gather and scatter (threads)",
)
LAID_DOWN = "gradients for the other threads"
TURNS, INPUTS = "turns of the process (threads)", "input in turns (threads)"
ONE_BY_ONE = "replicas one after the other (threads)"
BITS = "bits"


def add_gradient_sums(
    estimate: Estimate, ranks: int, bucket_bytes: float, hides: bool, as_counted: bool = True
) -> None:
    """Add what ``ranks`` processes send each other in a step of data parallelism.

    The buckets that they hold lie among their gradients already: see ``kway.cost.memory.gradients_at_peak``.

    Gradients are summed in buckets of ``bucket_bytes``, or in those that a profile counted where they are as large
    (``as_counted``), each by an all-reduce (an ordered tree reduction at level bits); where a step ``hides`` them, all
    but the last go on beside backward: see ``exposed_s``. A step whose forward or backward pass has collectives of its
    own hides nothing: what is sent ahead would come between them (``kway.step.share``). Those come on top, each as
    often as it is called, and none of them is hidden, since what follows needs the result. Raises
    ``NotMeasuredError``.
    """
    if ranks < 2:
        return
    workload = estimate.workload
    ordered = workload.level == BITS
    size = workload.parameters["gradient_bytes"]
    counted = workload.buckets if as_counted and not ordered else []
    buckets = counted or cut(size, bucket_bytes, workload.layers)
    for each in workload.collectives:
        # Sizes are those of the larger buffer: what all give, where each gets all of it.
        scale = ranks if each["what"] == ALL_GATHER else 1
        within = STATISTICS if each["when"] != "step" else BESIDE_GRADIENTS
        seconds = each["times"] * estimate.collective_s(each["what"], ranks, scale * each["bytes"])
        estimate.add(f"{within} ({each['what']})", seconds)
    talks = any(each["when"] != "step" for each in workload.collectives)
    name = ORDERED if ordered else ALL_REDUCE
    is_hidden = hides and not talks and len(buckets) > 1
    # Behind backward each follows computing; behind all of it only the first does.
    reductions = [
        estimate.collective_s(name, ranks, bucket, after_work=is_hidden or place == 0)
        for place, bucket in enumerate(buckets)
    ]
    # At level bits only the last of a device's shards can hide anything.
    backward = estimate.part_s("backward") / (-(-estimate.shards // ranks) if ordered else 1)
    if is_hidden:
        ready = complete_at(buckets, workload.layers, estimate.samples)
        slowdown = slowdown_of(estimate.measurements, max(buckets))
        estimate.add(name, exposed_s(list(zip(reductions, ready, strict=True)), backward, slowdown))
    else:
        estimate.add(name, sum(reductions))


def add_thread_sums(estimate: Estimate, replicas: int) -> None:
    """Add what replicas in the threads of one process cost each other, and the vectors that they lay down.

    Sums go through memory (``kway.comm.threads``), as long as they were measured to take; where they were not, a
    replica copies its gradients, adds up one of ``replicas`` slices of them all, and copies the others' slices: three
    copies of the bytes between the devices, as measured. Of each other collective it reads what all
    have laid down, one copy of ``replicas`` times the bytes.
    Raises ``NotMeasuredError`` where neither was measured.

    Input is read in turns, one replica after the other. On a CPU operations go on side by side, as much longer as
    measured, which has in it that Python runs in one thread at a time (CPython's global interpreter lock), and a step
    begins and ends with turns. Where that was not measured, and on GPUs, which go on while the process reads and starts
    operations, a step is no shorter than what the process does one thing after the other: for all replicas, and turns.
    """
    if replicas < 2:
        return
    size = estimate.workload.parameters["gradient_bytes"]
    passed = _handed_s(estimate, replicas, size, [size] * 3)
    for each in estimate.workload.collectives:
        every = replicas * each["bytes"]
        laid = every if each["what"] == ALL_GATHER else each["bytes"]
        passed += each["times"] * _handed_s(estimate, replicas, laid, [every])
    estimate.add(THREADS, passed)
    reading, starts, own = (estimate.terms.get(term, 0.0) for term in (INPUT, LAUNCH, COMPUTE))
    slower = slowdowns(estimate.measurements, MEASURED, replicas)
    turns = turns_s(estimate.measurements, replicas) or 0.0
    if estimate.on_cpu:
        estimate.add(INPUTS, (replicas - 1) * reading)
    else:
        starts += reading
    if estimate.on_cpu and estimate.workload.draws_on_cpu:
        # Threads of a process that has one generator on the CPU: decision 20.
        estimate.add(ONE_BY_ONE, (replicas - 1) * (starts + own))
    elif estimate.on_cpu and slower:
        estimate.slow_down(slower[LARGE], slower[SMALL], in_turns=[INPUT])
        estimate.add(TURNS, turns)
    else:
        estimate.add(TURNS, max(0.0, replicas * starts + turns - (starts + own)))
    # Until all have read them, what a replica lays down for the others is a third one of its gradients.
    kept = estimate.memory.get("activations", 0.0)
    estimate.hold(LAID_DOWN, gradients_at_peak(size, kept, copies=2) - gradients_at_peak(size, kept))


def _handed_s(estimate: Estimate, replicas: int, size: float, copies: Sequence[float]) -> float:
    """Return the seconds of a sum of ``size`` bytes, or of ``copies`` of so many bytes where no sum was measured."""
    measured = thread_sum_s(estimate.measurements, replicas, size) if estimate.on_cpu else None
    if measured is not None:
        return measured
    try:
        return sum(copied_s(estimate, each) for each in copies)
    except NotMeasuredError:
        if not estimate.on_cpu:
            raise
    raise NotMeasuredError(
        f"the time of a sum over {replicas} threads",
        "it was not measured here",
        f"measure it: kway measure --only beside --devices cpu:{replicas} --refresh",
    )


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
