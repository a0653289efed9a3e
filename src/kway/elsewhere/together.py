"""Figures of several GPUs at once, from a description: collectives, and what work side by side costs each other."""

from kway.elsewhere.description import Machine
from kway.elsewhere.figures import maker, product_s
from kway.elsewhere.links import counts, link_limit, seconds
from kway.measuring import copy_out, two_devices, under_collective
from kway.measuring.collective_figures import ALGORITHM, BANDWIDTH, BUS, LATENCY, TIME
from kway.measuring.collectives import ALL_REDUCE, COLLECTIVES, WIDTH, bus_factor, elements_of
from kway.measuring.experiments.collectives import EXPERIMENT as COLLECTIVE
from kway.measuring.experiments.overlap import EXPERIMENT as OVERLAP
from kway.measuring.figure import Figure
from kway.measuring.fitted import fitted
from kway.measuring.sides import BOTH, COMMUNICATE, COMPUTE, UNDER
from kway.measuring.sides import PRODUCTS as BESIDE

BACKEND = "nccl"


def collectives(machine: Machine) -> list[Figure]:
    """Return time, algorithm bandwidth and bus bandwidth by collective, number of ranks and size, and lines."""
    return [figure for ranks in reversed(counts(machine)) for figure in _among(machine, ranks)]


def _among(machine: Machine, ranks: int) -> list[Figure]:
    make, where = maker("collectives"), f"{BACKEND} on {ranks} GPUs"
    sizes, limit = COLLECTIVE.full["bytes_gpu"], link_limit(machine, ranks)
    figures, lines = [], []
    for collective in COLLECTIVES:
        taken = {size: seconds(machine, collective, ranks, size) for size in sizes}
        sent = {size: elements_of(size, ranks) * WIDTH for size in sizes}
        own = {"collective": collective, "backend": BACKEND, "ranks": ranks}
        for size in sizes:
            at, rate = {**own, "bytes": size}, sent[size] / taken[size]
            figures += [
                make.computed(f"{TIME}, {where}", at, "s", taken[size]),
                make.computed(f"{ALGORITHM}, {where}", at, "B/s", rate),
                make.computed(
                    f"{BUS}, {where}", at, "B/s", rate * bus_factor(collective, ranks), limit=limit
                ),
            ]
        points = [(sent[size], taken[size]) for size in sizes]
        lines += fitted(
            make, (f"{LATENCY}, {BACKEND} on GPUs", f"{BANDWIDTH}, {BACKEND} on GPUs"), own, points
        )
    return figures + lines


def slowdown(machine: Machine) -> float:
    """Return how many times as long products take beside a collective, which has some multiprocessors for itself."""
    return float(1 / (1 - machine.software["blocks"] / machine.gpu["multiprocessors"]))


def overlap(machine: Machine) -> list[Figure]:
    """Return what two GPUs, a copy beside products, and a collective beside products gain and cost."""
    figures = _copied_out(machine)
    if machine.total > 1:
        figures = (_two(machine) if machine.gpus > 1 else []) + figures + _beside(machine)
    return figures


def _two(machine: Machine) -> list[Figure]:
    """Two GPUs share nothing but the process that launches on both."""
    make, many = maker("overlap"), two_devices.PRODUCTS
    figures, hidden = [], []
    for n in OVERLAP.full["n"]:
        one = many * product_s(machine, "fp32", n)
        both = max(one, 2 * many * machine.software["launch_s"])
        ways = dict(zip(two_devices.WAYS, (one, one, 2 * one, both), strict=True))
        figures += [
            make.computed(two_devices.NAME, {"way": way, "n": n}, "s", taken) for way, taken in ways.items()
        ]
        hidden.append(make.computed(two_devices.HIDDEN, {"n": n}, "%", 100 * (2 * one - both) / one))
    return figures + hidden


def _copied_out(machine: Machine) -> list[Figure]:
    """Copies from pageable memory, and in one stream, hide nothing; on a side stream only the last one is seen."""
    make, many = maker("overlap"), copy_out.RESULTS
    slot, reached = machine.slot, machine.reached
    pinned_rate = slot["bandwidth"] * reached["slot"]
    figures, hidden = [], []
    for n in OVERLAP.full["n_copied"]:
        compute = many * product_s(machine, "fp32", n)
        pinned = many * (slot["latency_s"] + 4 * n * n / pinned_rate)
        pageable = many * (
            slot["latency_s"]
            + machine.software["done_s"]
            + 4 * n * n / min(slot["pageable_bandwidth"], pinned_rate)
        )
        alone = {
            copy_out.COMPUTE: compute,
            copy_out.PAGEABLE_COPY: pageable,
            copy_out.PINNED_COPY: pinned,
        }
        ways = {
            copy_out.IN_TURN: compute + pageable,
            copy_out.NON_BLOCKING: compute + pageable,
            copy_out.PINNED: compute + pinned,
            copy_out.SIDE: max(compute, pinned) + min(compute, pinned) / many,
        }
        for way, taken in {**alone, **ways}.items():
            figures.append(make.computed(copy_out.NAME, {"way": way, "n": n}, "s", taken))
        for way, copies in copy_out.WAYS.items():
            shorter = min(compute, alone[copies])
            part = (compute + alone[copies] - ways[way]) / shorter
            hidden.append(make.computed(copy_out.HIDDEN, {"way": way, "n": n}, "%", 100 * part))
    return figures + hidden


def _beside(machine: Machine) -> list[Figure]:
    """As many all-reduces as take about as long as the products, among all GPUs."""
    make = maker("overlap")
    n, sizes = OVERLAP.full["beside"]
    figures, gained, slower = [], [], []
    for size in sizes:
        compute = BESIDE * product_s(machine, "fp32", n)
        each = seconds(machine, ALL_REDUCE, machine.total, size)
        times = under_collective.repeats(compute, each)
        communicate, under = times * each, slowdown(machine) * compute
        both = max(communicate, min(under, compute + (1 - 1 / slowdown(machine)) * communicate))
        ways = {COMPUTE: compute, COMMUNICATE: communicate, BOTH: both, UNDER: under}
        at = {"n": n, "bytes": size}
        figures += [
            make.computed(under_collective.NAME, {"way": way, **at}, "s", taken)
            for way, taken in ways.items()
        ]
        part = (compute + communicate - both) / min(compute, communicate)
        gained.append(make.computed(under_collective.HIDDEN, at, "%", 100 * part))
        longer = max(compute, communicate)
        slower += [
            make.computed(under_collective.SLOWDOWN, {"of": "both at once", **at}, "x", both / longer),
            make.computed(under_collective.SLOWDOWN, {"of": "products", **at}, "x", under / compute),
        ]
    return figures + gained + slower
