"""How optimizer and schedule of a run began, so that a run does not go on with others unnoticed."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kway.checkpoints.names import own_parameters
from kway.checkpoints.optimizer import IMPLEMENTATION, options_by_name
from kway.checkpoints.reading import Checkpoint
from kway.errors import UsageError
from kway.step.scaling import Scaled
from kway.strategies.engine import Engine
from kway.training.facts import as_text, digest
from kway.training.pure import is_pure

# Of a checkpoint: what its optimizer and schedule were like when they were made.
BEGINNING = "beginning"
# What follows from the optimizer's rates, or from the schedule's other values, and says nothing beside these.
_DERIVED = ("base_lrs", "_last_lr")
# The same, of a schedule that was told the highest rate, or of a rate that the optimizer was told.
_FIRST, _HIGHEST = "initial_lr", "max_lr"
_TORCH = "torch.optim.lr_scheduler"
_CLASS = "class"
_PLAIN = (bool, int, float, str)
_LONG, _DEEP, _MOST = 64, 8, 4
# At which steps a function is asked for its rate.
_STEPS = (*range(1, 21), 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
# And for how many seconds at most; one call is not ended.
_MOST_S = 0.2


class Began(NamedTuple):
    """How an optimizer, and a schedule of it, were before the first step, as texts. What a schedule changes later says
    nothing about the job.

    ``kind``: the optimizer's class; ``made``: the options of each group when it was made, parameters' names among
    them; ``options``: once its schedule was made, too, which changes rates. ``schedule``: the values of the
    schedule's state by name, what it keeps among the optimizer's options (``max_lr``, say), what functions that it was
    given return at some steps, and its class; empty where there is none.
    """

    kind: str
    options: list[dict[str, str]]
    made: list[dict[str, str]]
    schedule: dict[str, str]

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint keeps of it beside the class, by the names of its parts."""
        return {"options": self.options, BEGINNING: {"groups": self.made, "schedule": self.schedule}}


def began(
    optimizer: torch.optim.Optimizer, model: nn.Module, made: list[dict[str, str]], schedule: Any
) -> Began:
    """Return how an optimizer of ``model`` is now, and ``schedule``; ``made``: its options before there was one."""
    options = options_by_name(optimizer, own_parameters(model).items())
    return Began(type(optimizer).__name__, options, made, _values(schedule, made, options))


def began_in(engine: Engine) -> Began:
    """Return how optimizer and schedule of an engine that has taken no step began."""
    return began(engine.optimizer, engine.model, engine.options_made, engine.schedule)


def differing_beginnings(
    checkpoint: Checkpoint, now: Began, names: bool = True, forms: bool = False
) -> dict[str, list[str]]:
    """List by ``optimizer`` and ``schedule`` what differs between those that a checkpoint's run began with and those at
    hand; what does not differ is left out.

    Of another class of optimizers only what both know by a name is compared. ``names``: whether those of parameters
    are. ``forms``: whether ways to compute the same step (foreach, fused) are, which settings and tuning may choose
    anew.
    """
    kind, made = checkpoint.part("optimizer")["kind"], _made(checkpoint)
    # An earlier version kept the options only as the schedule had left them.
    then, own = (checkpoint.part("options"), now.options) if made is None else (made["groups"], now.made)
    differ = [] if kind == now.kind else [f"{kind}, now {now.kind}"]
    differ += [
        f"{name} {as_text(a.get(name))}, now {as_text(b.get(name))}"
        for a, b in zip(then, own, strict=False)
        for name in ({**a, **b} if kind == now.kind else [name for name in a if name in b])
        if a.get(name) != b.get(name)
        # What a schedule notes of the rate says no more than the rate.
        and (name != "initial_lr" or a["lr"] == b["lr"])
        and (names or name != "names")
        and (forms or name not in IMPLEMENTATION)
    ]
    if len(then) != len(own):
        differ.append(f"{len(then)} groups of parameters, now {len(own)}")
    found = {
        "optimizer": differ,
        "schedule": [] if made is None else _differing(made["schedule"], now.schedule, bool(differ)),
    }
    return {what: lines for what, lines in found.items() if lines}


def check_options(checkpoint: Checkpoint, now: Began, within: Mapping[str, Any] | None) -> None:
    """Raise ``UsageError`` that lists what differs where the run began with another optimizer, schedule, or options.

    ``within``: what bits hold within now, ``None`` at other levels.
    """
    # Another kernel of the same step rounds otherwise, which matters where both runs hold bits.
    forms = None not in (checkpoint.part("within"), within)
    differ = differing_beginnings(checkpoint, now, forms=forms)
    if not differ:
        return
    alone = len(differ) == 1
    lines = [("" if alone else f"{what}: ") + "; ".join(found) for what, found in differ.items()]
    what = " and ".join(differ)
    raise UsageError(
        f"checkpoint {checkpoint.path} is of a job with another {what}: {'; '.join(lines)}",
        "its state goes with its options",
        f"go on with the same {what}, or start a new run from the weights (init=, --init)",
    )


def _made(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if BEGINNING not in checkpoint:
        return None
    found = checkpoint.part(BEGINNING)
    sound = isinstance(found, dict) and isinstance(found.get("groups"), list)
    return found if sound and isinstance(found.get("schedule"), dict) else None


def _differing(then: Mapping[str, str], now: Mapping[str, str], otherwise: bool) -> list[str]:
    """List what differs between two schedules. ``otherwise``: whether their optimizers do."""
    if bool(then) != bool(now):
        return [f"{then.get(_CLASS, 'none')}, now {now.get(_CLASS, 'none')}"]
    if then.get(_CLASS) != now.get(_CLASS):
        return [f"{then.get(_CLASS)}, now {now.get(_CLASS)}"]
    # Another version of torch keeps more of the same, or less.
    both = {_first(name) for name in then} & {_first(name) for name in now}
    names = [
        name
        for name in {**then, **now}
        if then.get(name) != now.get(name)
        and _first(name) in both
        # An earlier version did not ask for it.
        and (not _is_rate(name) or (name in then and name in now))
    ]
    follows = otherwise or _HIGHEST in map(_first, names)
    derived = (*_DERIVED, _FIRST) if follows else _DERIVED
    own = [name for name in names if not any(f".{each}" in f".{name}" for each in derived)]
    # What it was told goes by plain names; what it made of that, mostly, by others.
    told = [name for name in own if not name.rpartition(".")[2].startswith("_")]
    shown = told or own or ([] if otherwise else names)
    lines = [f"{name} {as_text(then.get(name))}, now {as_text(now.get(name))}" for name in shown[:_MOST]]
    return [*lines, *([f"{len(shown) - _MOST} more"] if len(shown) > _MOST else [])]


def _first(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def _values(
    schedule: Any, made: Sequence[Mapping[str, str]], options: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return class and state of a schedule as texts by name: what is a number, a text, or made of these; and what it
    added to the options of each group that an optimizer was ``made`` with.

    Of one whose rates are scaled, those of the job's own: the scale is looked at by itself.
    """
    own = schedule.own if isinstance(schedule, Scaled) else schedule
    if own is None:
        return {}
    # A class of the user's own may keep what is another value in each process, as the time at which it was made.
    known = all(type(each).__module__ == _TORCH for each in [own, *getattr(own, "_schedulers", ())])
    if not known:
        return {_CLASS: type(own).__name__}
    # Of what only torch's one-cycle schedule keeps there, nothing else tells.
    added = {
        name if len(options) == 1 else f"{name}[{place}]": value
        for place, (before, after) in enumerate(zip(made, options, strict=True))
        for name, value in after.items()
        if name not in before
    }
    return {_CLASS: type(own).__name__, **added, **dict(_flat(own.state_dict())), **dict(_rates(own))}


def _rates(schedule: Any, way: str = "") -> Iterator[tuple[str, str]]:
    """Yield what functions of the user's, of which a state says nothing, give at some steps, by what they are called.

    Only what can be asked without a trace is: see ``is_pure``. Where a function fails it gives nothing.
    """
    for place, each in enumerate(getattr(schedule, "_schedulers", ())):
        yield from _rates(each, f"{way}_schedulers[{place}].")
    given = {f"lr_lambdas[{place}]": f for place, f in enumerate(getattr(schedule, "lr_lambdas", ()))}
    given["scale_fn"] = getattr(schedule, "_scale_fn_custom", None)
    begun = time.monotonic()
    for name, function in given.items():
        for step in _STEPS if is_pure(function) else ():
            if time.monotonic() - begun > _MOST_S:
                # Those of early steps are told by then.
                return
            with suppress(Exception):
                yield f"{way}{name}({step})", f"{float(function(step)):.9g}"


def _is_rate(name: str) -> bool:
    return name.endswith(")")


def _flat(value: Any, way: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, _PLAIN):
        yield way, str(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield from _flat(value.tolist(), way, depth)
    elif isinstance(value, torch.Tensor):
        one = value.numel() == 1
        yield way, str(value.item()) if one else f"tensor {digest(value.detach().contiguous())}"
    elif depth == _DEEP:
        return
    elif isinstance(value, Mapping):
        for key, each in value.items():
            name = f"{way}.{key}" if way else str(key)
            yield from _flat(each, name if isinstance(key, str) else f"{way}[{key}]", depth + 1)
    elif isinstance(value, Sequence):
        if len(value) > _LONG and all(isinstance(each, _PLAIN) for each in value):
            yield way, f"{len(value)} values {digest(_bytes(str(list(value))))}"
            return
        for place, each in enumerate(value):
            yield from _flat(each, f"{way}[{place}]", depth + 1)


def _bytes(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())
