"""What a model costs on one device, as tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kway.report.tables import table
from kway.units import bytes_text, counted, rate_text, seconds_text
from kway.workload import Workload

# Layers that a table or a picture shows by themselves; all others are one row.
MOST_LAYERS = 16


@dataclass(frozen=True)
class Row:
    """A layer, or several, in a step over the whole batch: seconds, and of them those that no sample costs."""

    name: str
    type: str
    forward_s: float
    backward_s: float
    fixed_s: float
    flop: float | None
    kept_bytes: float
    parameters: int
    bound: str

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def by_layer(record: Workload, most: int = MOST_LAYERS) -> list[Row]:
    """Return the layers in the order of the model; beyond ``most`` those that take least are one row, the last."""
    rows = [_row(layer, record.batch_size) for layer in record.layers]
    if len(rows) <= most:
        return rows
    longest = sorted(rows, key=lambda row: -row.seconds)
    named, rest = longest[: most - 1], longest[most - 1 :]
    chosen = {id(row) for row in named}
    return [*(row for row in rows if id(row) in chosen), _together(rest)]


def _row(layer: dict[str, Any], samples: int) -> Row:
    forward, backward = (
        layer[part]["fixed_s"] + layer[part]["per_sample_s"] * samples for part in ("forward", "backward")
    )
    flop = layer["flop_per_sample"]
    return Row(
        layer["name"] or "(the model itself)",
        layer["type"],
        forward,
        backward,
        layer["forward"]["fixed_s"] + layer["backward"]["fixed_s"],
        None if flop is None else flop * samples,
        layer["activation_bytes_per_sample"] * samples,
        layer["parameters"],
        layer["bound"],
    )


def _together(rows: Sequence[Row]) -> Row:
    flops = [row.flop for row in rows if row.flop is not None]
    return Row(
        f"({len(rows)} others)",
        "",
        sum(row.forward_s for row in rows),
        sum(row.backward_s for row in rows),
        sum(row.fixed_s for row in rows),
        sum(flops) if len(flops) == len(rows) else None,
        sum(row.kept_bytes for row in rows),
        sum(row.parameters for row in rows),
        "",
    )


def lines_of(record: Workload) -> list[str]:
    """Return the tables of steps and of layers, and what memory a step takes."""
    return [
        f"{record.model} on {record.device_name} ({record.device}), {record.precision}, {record.level}, "
        f"batch {record.batch_size}",
        "",
        table(
            ["step", "of devices", "threads", "samples", "step takes", "spread", "forward", "backward",
             "optimizer", "input"],
            list(_steps(record)),
        ),
        "",
        table(
            ["layer", "type", "forward", "backward", "fixed", "does", "kept", "parameters", "bound by"],
            [_cells(row) for row in by_layer(record)],
        ),
        "",
        *_memory(record),
        *_others(record),
    ]  # fmt: skip


def _steps(record: Workload) -> Iterable[list[str | None]]:
    keys = ("step_kind", "devices", "threads", "samples")
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for timing in record.timings:
        found.setdefault(tuple(timing[key] for key in keys), {})[timing["part"]] = timing
    for (kind, devices, threads, samples), parts in found.items():
        step = parts.get("step")
        yield [
            kind,
            str(devices),
            str(threads),
            f"{samples:,}",
            None if step is None else seconds_text(step["seconds"]),
            None if step is None else f"{step['spread']:.1%}",
            *(
                seconds_text(parts[part]["seconds"]) if part in parts else None
                for part in ("forward", "backward", "optimizer", "input")
            ),
        ]


def _cells(row: Row) -> list[str | None]:
    return [
        row.name,
        row.type,
        seconds_text(row.forward_s),
        seconds_text(row.backward_s),
        f"{row.fixed_s / row.seconds:.0%}" if row.seconds else None,
        None if row.flop is None else rate_text(row.flop / row.seconds, "FLOP/s") if row.seconds else None,
        bytes_text(round(row.kept_bytes)),
        f"{row.parameters:,}",
        row.bound,
    ]


def _memory(record: Workload) -> list[str]:
    own, memory = record.parameters, record.memory
    kept = memory["activation_fixed_bytes"] + memory["activation_bytes_per_sample"] * record.batch_size
    lines = [
        f"memory     weights {bytes_text(own['bytes'])}, gradients {bytes_text(own['gradient_bytes'])}, "
        f"optimizer {bytes_text(own['optimizer_bytes'])}, buffers {bytes_text(own['buffer_bytes'])}, "
        f"activations {bytes_text(round(kept))} ({bytes_text(round(memory['activation_bytes_per_sample']))} a sample)"
    ]
    again = memory["checkpointed_activation_bytes_per_sample"]
    if again is not None:
        lines.append(f"           with its blocks computed again {bytes_text(round(again))} a sample")
    flop = record.flop_per_sample
    lines.append(
        f"sample     {'operations not counted' if flop is None else f'{flop:.4g} operations'}, "
        f"{bytes_text(record.sample_bytes)} of input and target"
    )
    return lines


def _others(record: Workload) -> list[str]:
    lines = [
        f"gradients  {', '.join(f'{count:,} of {name}' for name, count in record.gradients.items()) or 'none'}"
        + (f", in {counted(len(record.buckets), 'call')}" if record.buckets else "")
    ]
    calls = sum(call["times"] for call in record.collectives)
    if calls:
        bytes_ = sum(call["times"] * call["bytes"] for call in record.collectives)
        lines.append(
            f"beside     {calls} small collectives a step on several devices, {bytes_text(bytes_)} each way"
        )
    if record.parameters["tied"]:
        lines.append(f"tied       {', '.join(record.parameters['tied'])}")
    lines += [f"left       {kind}: {why}" for kind, why in record.step_kinds_left.items()]
    lines += [f"note       {text}" for text in record.notices]
    lines.append(f"measured   in {record.seconds:.0f} s")
    return lines
