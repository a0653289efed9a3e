"""How the optimizer of a run began, so that a run does not go on with another one unnoticed."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from kway.checkpoints.optimizer import IMPLEMENTATION, state_by_name
from kway.checkpoints.reading import Checkpoint
from kway.errors import UsageError
from kway.training.facts import as_text


class Began(NamedTuple):
    """How an optimizer was before the first step: its class, and the options of each group as texts, parameters' names
    among them. What a schedule changes later says nothing about the job.
    """

    kind: str
    options: list[dict[str, str]]


def began(optimizer: torch.optim.Optimizer, model: nn.Module) -> Began:
    """Return how an optimizer of ``model`` is now."""
    state = state_by_name(optimizer, model.named_parameters())
    return Began(
        state["kind"], [{name: str(value) for name, value in group.items()} for group in state["groups"]]
    )


def differing_options(
    checkpoint: Checkpoint, now: Began, names: bool = True, forms: bool = False
) -> list[str]:
    """List what differs between the optimizer that a checkpoint's run began with and the one at hand.

    Of another class only what both know by a name is compared. ``names``: whether those of parameters are. ``forms``:
    whether ways to compute the same step (foreach, fused) are, which settings and tuning may choose anew.
    """
    kind, then = checkpoint.part("optimizer")["kind"], checkpoint.part("options")
    differ = [] if kind == now.kind else [f"{kind}, now {now.kind}"]
    differ += [
        f"{name} {as_text(a.get(name))}, now {as_text(b.get(name))}"
        for a, b in zip(then, now.options, strict=False)
        for name in ({**a, **b} if kind == now.kind else [name for name in a if name in b])
        if a.get(name) != b.get(name)
        # What a schedule notes of the rate says no more than the rate.
        and (name != "initial_lr" or a["lr"] == b["lr"])
        and (names or name != "names")
        and (forms or name not in IMPLEMENTATION)
    ]
    if len(then) != len(now.options):
        differ.append(f"{len(then)} groups of parameters, now {len(now.options)}")
    return differ


def check_options(checkpoint: Checkpoint, now: Began, within: Mapping[str, Any] | None) -> None:
    """Raise ``UsageError`` that lists what differs where the run began with another optimizer, or other options.

    ``within``: what bits hold within now, ``None`` at other levels.
    """
    # Another kernel of the same step rounds otherwise, which matters where both runs hold bits.
    forms = None not in (checkpoint.part("within"), within)
    differ = differing_options(checkpoint, now, forms=forms)
    if differ:
        raise UsageError(
            f"checkpoint {checkpoint.path} is of a job with another optimizer: {'; '.join(differ)}",
            "its state goes with its options",
            "go on with the same optimizer, or start a new run from the weights (init=, --init)",
        )
