"""Prices that tests set, and records made of them."""

from kway.devices.simulated import simulated
from kway.errors import UsageError
from kway.planning.candidates import candidates, device_sets
from kway.planning.explain import CLOSE
from kway.planning.price import Price, Scaling
from kway.planning.search import search

PER_SAMPLE_S, FIXED_S = 1e-4, 1e-3
WEIGHTS = 1 << 20
PER_SAMPLE_BYTES = 1 << 12


def line(all_reduce_s=5e-4, per_sample_s=PER_SAMPLE_S, fixed_s=FIXED_S):
    """Price by a line: every device takes its share, and several add up gradients."""

    def price(candidate, batch):
        if "unmeasured" in candidate.layout:
            raise UsageError("no all-reduce over 3 ranks", "it was not measured", "kway measure")
        share = -(-batch // candidate.devices)
        terms = {"compute": fixed_s + per_sample_s * share}
        if candidate.devices > 1:
            terms["all-reduce"] = all_reduce_s
        memory = {"weights": WEIGHTS, "activations": PER_SAMPLE_BYTES * share}
        return Price(terms, memory, fixed=(fixed_s, 0.0))

    return price


def found(
    batch=256,
    price=None,
    cluster=None,
    weak=False,
    room=None,
    kinds=("eager",),
    strategies=None,
    sets=None,
    close=CLOSE,
    level="math",
    has_blocks=True,
):
    """Search over a machine of two cores, or of ``cluster``."""
    cluster = cluster or simulated(cores=2)
    every, _ = candidates(
        sets or device_sets(cluster), lambda device: kinds, lambda ranks, gpu: 1, "math", 8, strategies
    )
    return search(
        every,
        price or line(),
        lambda candidate: room,
        Scaling(batch, weak),
        cluster.cpu["usable"],
        1e6,
        "example",
        level,
        close,
        has_blocks,
    )
