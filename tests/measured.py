"""Small measurements for tests, of which every number is known."""

from typing import Any

from kway.measurements import Measurements


def figure(experiment: str, name: str, unit: str, value: float, **parameters: Any) -> dict[str, Any]:
    """Return a figure as records hold it."""
    return {
        "experiment": experiment, "name": name, "parameters": parameters, "unit": unit, "value": value,
        "spread": 0.01, "raw": [], "limit": None, "share": None, "notes": [],
    }  # fmt: skip


def entry(name: str, **changes: Any) -> dict[str, Any]:
    """Return what records hold of an experiment."""
    return {
        "name": name, "how": "measured", "why": "", "quick": True, "made": "2026-01-01T00:00:00+00:00", "age_s": 0.0,
        "seconds": 1.0, "tries": 1, "drift": 0.0, "noisy": "", "left": {}, "notes": [], "busy": "", **changes,
    }  # fmt: skip


def timed(
    seconds: dict[int, float], collective: str = "all-reduce", ranks: int = 2, backend: str = "gloo"
) -> list[dict[str, Any]]:
    """Return the times of a collective, seconds by bytes, as ``kway measure`` names them."""
    kind = "CPU ranks" if backend == "gloo" else "GPUs"
    where = f"time, {backend} on {ranks} {kind}"
    own = {"collective": collective, "backend": backend, "ranks": ranks}
    return [figure("collectives", where, "s", value, **own, bytes=size) for size, value in seconds.items()]


def bandwidth(value: float, collective: str = "all-reduce", ranks: int = 2) -> dict[str, Any]:
    """Return the fitted bandwidth of a collective through Gloo."""
    own = {"collective": collective, "backend": "gloo", "ranks": ranks}
    return figure("collectives", "fitted bandwidth, gloo on CPU ranks", "B/s", value, **own)


def two_devices(alone: float, at_once: float, n: int = 128) -> list[dict[str, Any]]:
    """Return what 50 products take on two devices."""
    ways = {"first alone": alone, "second alone": alone, "one after the other": 2 * alone, "at once": at_once}
    return [
        figure("overlap", "two devices, 50 products each", "s", value, way=way, n=n)
        for way, value in ways.items()
    ]


def beside(large: float, small: float, of: str = "ranks", count: int = 2) -> list[dict[str, Any]]:
    """Return how many times as long large and small operations take beside those of others."""
    return [
        figure(
            "beside",
            f"{of} beside each other: slowdown",
            "x",
            value,
            **{"of": f"{kind} operations", of: count},
        )
        for kind, value in (("large", large), ("small", small))
    ]


def after_work(
    seconds: dict[int, float], collective: str = "all-reduce", ranks: int = 2, backend: str = "gloo"
) -> list[dict[str, Any]]:
    """Return the times of a collective that follows computing, seconds by bytes."""
    own = {"collective": collective, "backend": backend, "ranks": ranks}
    return [
        figure("beside", "collective after work", "s", value, **own, bytes=size)
        for size, value in seconds.items()
    ]


def turns(seconds: float, threads: int = 2) -> dict[str, Any]:
    """Return what so many threads take for their turns in a step."""
    return figure("beside", "turns of threads", "s", seconds, threads=threads)


def sums(seconds: dict[int, float], threads: int = 2) -> list[dict[str, Any]]:
    """Return what sums over threads take, seconds by bytes."""
    return [
        figure("beside", "sum of threads", "s", value, threads=threads, bytes=size)
        for size, value in seconds.items()
    ]


def slowdown(by_size: dict[int, float]) -> list[dict[str, Any]]:
    """Return the slowdown of products beside an all-reduce, by its bytes."""
    return [
        figure("overlap", "slowdown beside an all-reduce", "x", value, of="products", n=256, bytes=size)
        for size, value in by_size.items()
    ]


def copies(
    rate: float, first: str = "cpu", second: str = "cpu", sizes: tuple[int, ...] = (1024, 1 << 20)
) -> list[dict[str, Any]]:
    """Return one rate of copies for these sizes."""
    own = {"from": first, "to": second, "memory": "pageable"}
    return [figure("copies", "copy", "B/s", rate, **own, bytes=size) for size in sizes]


def measurements(*figures: dict[str, Any]) -> Measurements:
    """Return a record of these figures."""
    names = ("collectives", "overlap", "copies", "beside", "compute")
    experiments = [entry(name) for name in names]
    return Measurements(
        machine={}, versions={}, devices=["cpu"], quick=True, made="2026-01-01T00:00:00+00:00", age_s=0.0,
        seconds=1.0, experiments=experiments, figures=list(figures),
    )  # fmt: skip


def usual(ranks: tuple[int, ...] = (2, 3, 4, 7, 8), backend: str = "gloo") -> Measurements:
    """Return what any layout over so many ranks needs: a collective takes 1 ms, and 1 ns a byte."""
    sizes = (1024, 1 << 20, 1 << 24)
    names = ("all-reduce", "all-gather", "ordered tree reduction")
    line = {size: 1e-3 + 1e-9 * size for size in sizes}
    return measurements(
        *(each for count in ranks for name in names for each in timed(line, name, count, backend)),
        *two_devices(1.0, 1.1),
        *copies(1e9),
        *(each for first in ("cuda:0",) for each in copies(1e9, first, "cuda:1")),
    )
