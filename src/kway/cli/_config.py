"""What a run tells of a ``kway.Job`` when it begins, as lines like those of a model that flags describe."""

from collections.abc import Mapping
from typing import Any

# Options of an optimizer that are shown beside its rate, where they are not nothing.
_SHOWN = ("momentum", "betas", "weight_decay")


def config_lines(config: Mapping[str, Any]) -> list[str]:
    """Return the lines. ``config``: ``job`` of the event ``start``."""
    held, micro = config["held_out"], micro_text(config["micro_batch"])
    amounts = [
        f"{count} {what}"
        for count, what in ((config["samples"], "to train on"), (held, "held out"))
        if count is not None
    ]
    rows = {
        "data": f"{config['data']}{': ' if amounts else ''}{', '.join(amounts)}",
        "loss": config["loss"] or "the model's own",
        "penalty": config["penalty"],
        "optimizer": _optimizer(config),
        "schedule": config["schedule"],
        "batch": f"{config['batch_size']} (global){micro}, {config['precision']}, seed {config['seed']}",
    }
    return [f"{name:10} {text}" for name, text in rows.items() if text is not None]


def micro_text(micro_batch: int | None) -> str:
    """Say how many samples a device computes at once, where that is fixed."""
    return "" if micro_batch is None else f", micro-batch {micro_batch}"


def _optimizer(config: Mapping[str, Any]) -> str:
    # A schedule may have changed the rates already.
    first = "" if config["schedule"] is None else " at first"
    options = {name: config.get(f"optimizer_{name}") for name in _SHOWN}
    parts = [f"{name} {_text(value)}" for name, value in options.items() if value]
    return ", ".join([str(config["optimizer"]), f"lr {_text(config.get('optimizer_lr'))}{first}", *parts])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_text, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
