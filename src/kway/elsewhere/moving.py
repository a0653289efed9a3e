"""A workload that was measured here as it would be on another device: each part of it by the rate that bounds it.

The roofline of a layer (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009),
used backwards: what a sample takes here is its operations, or its bytes, at the part of the device's rate that this
layer reaches; the same part is reached there. Where what bounds a layer here is fast enough there, the other bounds it.
What does not grow with the batch is launches. All of it is an estimate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kway.errors import UsageError
from kway.measurements import Measurements
from kway.measuring.experiments.copies import NON_BLOCKING
from kway.measuring.products import DTYPES
from kway.planned import device_type
from kway.units import rate_text
from kway.workload import Workload

PASSES = ("forward", "backward")
# Backward multiplies twice as often as forward: for the gradients of inputs and of weights.
FLOP = {"forward": 1 / 3, "backward": 2 / 3}
# How often what a layer keeps is read and written; of what does not bound it here, a guess is enough.
PASSED = {"forward": 2, "backward": 4}
# From this part of a layer's time on that does not grow with the batch, launches are what bounds it.
LAUNCHES = 0.5


@dataclass(frozen=True)
class Rates:
    """What a device reaches: operations and bytes a second, seconds of a launch and of a byte from CPU memory."""

    flops_s: float
    bytes_s: float
    launch_s: float
    in_s: float


@dataclass(frozen=True)
class Ratios:
    """How many times as long something takes there as here, by what bounds it."""

    compute: float
    memory: float
    launch: float


def moved(workload: Workload, here: Measurements, there: Measurements) -> Workload:
    """Return ``workload``, measured on a device of ``here``, as an estimate for the first GPU (or the CPU) of
    ``there``.

    Times are scaled: layers as above, the optimizer by its bytes and its launches, input by what it takes longer or
    shorter to copy, and the rest of a step with its layers. Bytes and counts stay. On another type of device only what
    was timed with the most threads counts. Raises ``UsageError`` where a rate was measured on one of both only, or on
    none.
    """
    device = next((name for name in there.devices if name != "cpu"), "cpu")
    before, after = (
        rates_of(here, workload.device, workload.precision),
        rates_of(there, device, workload.precision),
    )
    ratios = Ratios(
        before.flops_s / after.flops_s, before.bytes_s / after.bytes_s, after.launch_s / before.launch_s
    )
    names = there.machine.get("gpus") or []
    name = names[0] if device != "cpu" and names else str(there.machine.get("cpu", device))
    layers = [_layer(layer, before, ratios, workload.batch_size, name) for layer in workload.layers]
    same_type = device_type(device) == device_type(workload.device)
    threads = int(there.machine.get("threads", 1))
    kept = workload if same_type else _with_most_threads(workload)
    lines = _Lines(kept, layers, before, after, ratios)
    host = {"threads": max(1, threads)} if device != "cpu" else {}
    return replace(
        kept,
        device=device,
        device_name=name,
        machine=dict(there.machine),
        layers=layers,
        fits=[{**fitted, **host, **lines.of(fitted)} for fitted in kept.fits],
        timings=[
            {**timing, **host, "seconds": timing["seconds"] * lines.ratio(timing)} for timing in kept.timings
        ],
        notices=[*workload.notices, *_noisy(here), _said(workload, name, before, after)],
    )


def rates_of(measurements: Measurements, device: str, precision: str) -> Rates:
    """Return what a device reaches, of the figures of ``kway measure``. Raises ``UsageError`` for what is missing."""
    until = "done" if device == "cpu" else "queued"
    # CPUs have no TF32: there it is fp32.
    dtype = "fp32" if (device, precision) == ("cpu", "tf32") else precision
    found = {
        f"matrix product in {dtype}": _values(
            measurements, "compute", "matrix product", device=device, dtype=dtype
        ),
        "memory bandwidth": _values(measurements, "compute", "memory bandwidth", device=device)
        or _of_largest_sums(measurements, device),
        "launch": _values(measurements, "compute", "launch", device=device, until=until),
    }
    for what, values in found.items():
        if not values:
            raise UsageError(
                f"no figure of {what} on {device} of {measurements.machine.get('host', 'this machine')}",
                "a workload is scaled by it",
                "measure it with kway measure --only compute, or take another --precision",
            )
    products, memory, launch = found.values()
    way: dict[str, Any] = {"from": "cpu", "to": device, "memory": NON_BLOCKING}
    copied = _values(measurements, "copies", "copy bandwidth", **way)
    return Rates(max(products), max(memory), min(launch), 1 / max(copied) if copied else 0.0)


def _of_largest_sums(measurements: Measurements, device: str) -> list[float]:
    """Return the bytes a second of the longest sums of two vectors: a short measurement may have no more."""
    found = [
        (
            figure["parameters"]["elements"],
            figure["value"] * 3 * DTYPES[figure["parameters"]["dtype"]].itemsize,
        )
        for figure in measurements.find("compute", "elementwise add", device=device)
        if figure["parameters"]["dtype"] in DTYPES and figure["value"] > 0
    ]
    longest = max((elements for elements, _ in found), default=0)
    return [rate for elements, rate in found if elements == longest]


def _values(measurements: Measurements, experiment: str, name: str, **parameters: Any) -> list[float]:
    figures = measurements.find(experiment, name, **parameters)
    return [float(figure["value"]) for figure in figures if figure["value"] > 0]


def _layer(layer: dict[str, Any], here: Rates, ratios: Ratios, batch: int, name: str) -> dict[str, Any]:
    lines, compute, memory = {}, 0.0, 0.0
    for part in PASSES:
        own, bytes_s = _two_times(layer, part, here)
        own, bytes_s = own * ratios.compute, bytes_s * ratios.memory
        compute, memory = compute + own, memory + bytes_s
        lines[part] = {
            **layer[part],
            "fixed_s": layer[part]["fixed_s"] * ratios.launch,
            "per_sample_s": max(own, bytes_s),
        }
    fixed = sum(line["fixed_s"] for line in lines.values())
    grows = batch * sum(line["per_sample_s"] for line in lines.values())
    bound = "compute" if compute >= memory else "memory"
    if fixed > 0 and fixed >= LAUNCHES * (fixed + grows):
        bound = "launch"
    why = f"an estimate for {name}; bound by {layer['bound']} where it was measured"
    return {**layer, **lines, "bound": bound, "why": why}


def _two_times(layer: dict[str, Any], part: str, here: Rates) -> tuple[float, float]:
    """Return what operations, and what bytes, of a sample take here; the longer one is what was measured."""
    taken = float(layer[part]["per_sample_s"])
    compute = (layer["flop_per_sample"] or 0.0) * FLOP[part] / here.flops_s
    memory = layer["activation_bytes_per_sample"] * PASSED[part] / here.bytes_s
    if layer["bound"] == "compute":
        return taken, min(memory, taken)
    if layer["bound"] == "memory":
        return min(compute, taken), taken
    longer = max(compute, memory)
    return (compute * taken / longer, memory * taken / longer) if longer else (0.0, taken)


class _Lines:
    """The fitted lines of a workload as they are elsewhere, part by part."""

    def __init__(
        self, workload: Workload, layers: list[dict[str, Any]], here: Rates, there: Rates, ratios: Ratios
    ) -> None:
        self._here, self._there, self._ratios = here, there, ratios
        self._workload = workload
        self._fits = {_key(fitted): fitted for fitted in workload.fits}
        self._growth = {part: self._grows((part,), layers) for part in PASSES}
        self._whole = self._grows(PASSES, layers)
        sizes = workload.parameters
        # Gradients are read; weights and state are read and written.
        updated = sizes["gradient_bytes"] + 2 * sizes["bytes"] + 2 * sizes["optimizer_bytes"]
        self._update_s = updated / here.bytes_s

    def _grows(self, parts: Iterable[str], layers: list[dict[str, Any]]) -> float:
        before = sum(layer[part]["per_sample_s"] for layer in self._workload.layers for part in parts)
        after = sum(layer[part]["per_sample_s"] for layer in layers for part in parts)
        # Of a model without layers that take time the slower of both rates.
        return float(after / before) if before > 0 else max(self._ratios.compute, self._ratios.memory)

    def of(self, fitted: dict[str, Any]) -> dict[str, float]:
        """Return ``fixed_s`` and ``per_sample_s`` of a line there."""
        fixed, each = self._part(fitted) if fitted["part"] != "step" else self._step(fitted)
        return {"fixed_s": fixed, "per_sample_s": each}

    def ratio(self, timing: dict[str, Any]) -> float:
        """Return how many times as long what was timed takes there: as its line says at that share."""
        fitted = self._fits.get(_key({**timing, "several": timing["devices"] > 1}))
        before = 0.0 if fitted is None else _at(fitted, timing["samples"])
        if fitted is None or before <= 0:
            return self._growth.get(timing["part"], self._whole)
        return _at(self.of(fitted), timing["samples"]) / before

    def _part(self, fitted: dict[str, Any]) -> tuple[float, float]:
        fixed, each, part = float(fitted["fixed_s"]), float(fitted["per_sample_s"]), fitted["part"]
        if part == "optimizer":
            return self._updated(fixed), each * self._ratios.memory
        if part == "input":
            # What the host does to load stays; only the copy is another.
            more = self._workload.sample_bytes * (self._there.in_s - self._here.in_s)
            return fixed, max(0.0, each + more)
        return fixed * self._ratios.launch, each * self._growth[part]

    def _updated(self, fixed: float) -> float:
        """Return what the optimizer takes: its bytes by the memory's rate, the rest by that of launches."""
        by_memory = min(fixed, float(self._update_s))
        return by_memory * self._ratios.memory + (fixed - by_memory) * self._ratios.launch

    def _step(self, step: dict[str, Any]) -> tuple[float, float]:
        """Return the line of a whole step: the sum of its parts, and of what is in none; as one where none is known."""
        parts = [self._fits.get(_key({**step, "part": part})) for part in (*PASSES, "optimizer", "input")]
        known = [fitted for fitted in parts if fitted is not None]
        if not {"forward", "backward"} <= {fitted["part"] for fitted in known}:
            return self._updated(step["fixed_s"]), step["per_sample_s"] * self._whole
        after = [self._part(fitted) for fitted in known]
        fixed = _whole(
            step["fixed_s"], [f["fixed_s"] for f in known], [a for a, _ in after], self._ratios.launch
        )
        each = _whole(
            step["per_sample_s"], [f["per_sample_s"] for f in known], [b for _, b in after], self._whole
        )
        return fixed, each


def _whole(step: float, parts: list[float], after: list[float], rest: float) -> float:
    """Return what a step takes there: what its ``parts`` do, and what is in none, ``rest`` times as long.

    Parts that go on beside each other add up to more than the step: then all shrink as they do together.
    """
    known = sum(parts)
    if known > step:
        return step * sum(after) / known
    return sum(after) + (step - known) * rest


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["step_kind"], entry["threads"], entry["several"], entry["part"]


def _at(line: dict[str, Any], samples: int) -> float:
    return float(line["fixed_s"] + line["per_sample_s"] * samples)


def _with_most_threads(workload: Workload) -> Workload:
    """Leave out what was timed with fewer threads than the device has: of another type it says nothing."""
    most = max((timing["threads"] for timing in workload.timings), default=1)
    return replace(
        workload,
        timings=[timing for timing in workload.timings if timing["threads"] == most],
        fits=[fitted for fitted in workload.fits if fitted["threads"] == most],
    )


def _noisy(here: Measurements) -> list[str]:
    """Say that the rates of this machine are not to be trusted, where it was too noisy for them."""
    return [
        f"estimates rest on figures of a machine that was too noisy: {entry['noisy']}"
        for entry in here.experiments
        if entry["name"] == "compute" and entry.get("noisy")
    ]


def _said(workload: Workload, name: str, here: Rates, there: Rates) -> str:
    pairs = (
        ("products", rate_text(here.flops_s, "FLOP/s"), rate_text(there.flops_s, "FLOP/s")),
        ("memory", rate_text(here.bytes_s, "B/s"), rate_text(there.bytes_s, "B/s")),
        ("launch", f"{here.launch_s * 1e6:.3g} us", f"{there.launch_s * 1e6:.3g} us"),
    )
    said = ", ".join(f"{what} {before} to {after}" for what, before, after in pairs)
    return f"an estimate: measured on {workload.device_name}, scaled to {name} ({said})"
