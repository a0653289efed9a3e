"""Calls of a user's loop that all ranks must make: whether they made the same one, before anything else is sent."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import torch

from kway.comm.group import Group
from kway.errors import MispairedError
from kway.launch.stall import names
from kway.launch.status import CALL, COLLECTIVES, Status
from kway.strategies.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")


class _Side(Protocol):
    _group: Group
    _status: Status
    engine: Engine


S = TypeVar("S", bound=_Side)
Call: TypeAlias = Callable[Concatenate[S, P], R]


def together(phase: str = "") -> Callable[[Call[S, P, R]], Call[S, P, R]]:
    """Have ranks meet where a method of a session begins, which raises ``MispairedError`` where they called others.

    What a call sends may be paired with what another rank sends in a step, which Gloo answers by ending the process.
    Its barrier is paired with barriers only: a rank that is elsewhere is waited for, and named. Costs a barrier, on
    CPUs, and a gather of one number. ``phase``: what the rank is at meanwhile (one of ``PHASES``), if nothing else.
    """

    def of(method: Call[S, P, R]) -> Call[S, P, R]:
        name = f"{CALL}{method.__name__}"

        @wraps(method)
        def met(side: S, /, *args: P.args, **options: P.kwargs) -> R:
            with side._status.doing(phase) if phase else nullcontext():
                meet(side._group, name, side.engine.device)
                return method(side, *args, **options)

        return met

    return of


def meet(group: Group, name: str, device: torch.device) -> None:
    """Wait until all ranks are at the call ``name`` (one of ``COLLECTIVES``): a collective. See ``together``."""
    if group.size == 1:
        return
    # Of a loop that catches the error the next step is to fit together: only some of the calls take note of this one.
    noted = group.trace.left
    if device.type == "cpu":
        group.barrier(name)
    # The same of all calls for the fingerprint of a step: which they were is told here.
    found = group.stack(torch.tensor(COLLECTIVES.index(name), device=device)).tolist()
    if len(set(found)) == 1:
        return
    where: dict[int, list[int]] = {}
    for rank, call in enumerate(found):
        where.setdefault(call, []).append(rank)
    group.trace.left = noted
    raise MispairedError(
        "; ".join(f"{names(ranks)} called {COLLECTIVES[call]}" for call, ranks in where.items()),
        "all ranks must make the same calls, in the same order",
        "look for a branch on the rank, or on data, around one of them",
    )
