"""A machine of which tests know every figure: two CPU ranks that talk in straight lines."""

from tests.measured import entry

from kway.measurements import Measurements

SIZES = (1 << 10, 1 << 20)
LATENCY_S, BYTES_PER_S = 1e-4, 1e9
COPY_BYTES_PER_S = 1e10


def measurements(ranks=(2,), latency_s=LATENCY_S, copy_bytes_per_s=COPY_BYTES_PER_S):
    """Return measurements of collectives among so many ranks, and of copies."""
    figures = [
        figure(
            "collectives",
            "time, CPU ranks",
            {"collective": name, "backend": "gloo", "ranks": count, "bytes": size},
            "s",
            latency_s + size / BYTES_PER_S,
        )
        for name in ("all-reduce", "all-gather", "ordered tree reduction")
        for count in ranks
        for size in SIZES
    ]
    figures += [
        figure("copies", "copy", {"from": "cpu", "to": "cpu", "bytes": size}, "B/s", copy_bytes_per_s)
        for size in SIZES
    ]
    experiments = [entry(name) for name in ("collectives", "copies")]
    return Measurements(
        machine={}, versions={}, devices=["cpu"], quick=True, made="2026-01-01T00:00:00+00:00", age_s=0.0, seconds=1.0,
        experiments=experiments, figures=figures,
    )  # fmt: skip


def figure(experiment, name, parameters, unit, value):
    """Return one figure of a record."""
    return {
        "experiment": experiment, "name": name, "parameters": parameters, "unit": unit, "value": value, "spread": 0.01,
        "raw": [], "limit": None, "share": None, "notes": [],
    }  # fmt: skip
