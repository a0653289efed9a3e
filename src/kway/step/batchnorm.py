"""Batch normalisation layers that see the global batch, without a change to the model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kway.comm.group import Group
from kway.comm.operation import GatherOperation
from kway.errors import RefusedError, UsageError, one_line, text_of
from kway.step.checkpointing import recomputing
from kway.step.normalise import Normalise, gather_statistics
from kway.step.presence import Presence
from kway.step.running import Running, count_batch
from kway.step.stand_in import Forward, stand_in_of, standing_in
from kway.step.traced import Chain, normalised
from kway.units import counted

# What torch says, and kway in its place.
_TOO_FEW = (
    "Expected more than 1 value per channel when training",
    "batch normalisation needs more than 1 value",
)
_LARGER = (
    "a larger batch, and data of as many samples at least; where it is the last batch of an epoch that is too small, "
    "one that leaves a larger rest or none"
)


def layers(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """List the batch normalisation layers of a model, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def replaceable_layers(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """List the batch normalisation layers. Raises ``RefusedError`` for one whose forward is not torch's own."""
    found = layers(model)
    for name, module in found:
        own = type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        if own or ("forward" in vars(module) and stand_in_of(module) is None):
            raise RefusedError(
                f"layer {name!r} ({type(module).__name__}) computes batch statistics in a forward of its own",
                "kway must know how to compute them over the whole batch",
                "use torch's BatchNorm there, or exactness loose",
            )
    return found


@contextmanager
def several_values(model: nn.Module, place: int, shares: int, presence: Presence) -> Iterator[None]:
    """While open, a layer that gets one value a channel to train on a share raises ``RefusedError``.

    torch's own message speaks of the input alone, and not of the split that made it so small. ``place`` of
    ``shares``: which share this rank computes.
    """

    def hook_of(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0] if args else None
            if module.training and isinstance(x, torch.Tensor) and x.dim() > 1 and x.numel() == x.size(1):
                presence.refuse_one_value(name, tuple(x.shape), place, shares)

        return hook

    with ExitStack() as hooks:
        for name, module in layers(model):
            if type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                hooks.callback(module.register_forward_pre_hook(hook_of(name)).remove)
        yield


def without_statistics(error: BaseException, batch_size: int) -> UsageError | None:
    """Return what to raise in place of what torch, or kway in its words, says of a batch that has no statistics;
    ``None`` for any other exception.
    """
    if type(error) is not ValueError or not text_of(error).startswith(_TOO_FEW):
        return None
    # kway's own words say what to do there.
    said, _, helps = one_line(text_of(error)).partition(": use ")
    return UsageError(
        f"a batch of {counted(batch_size, 'sample')}, on which a layer that normalises cannot be trained ({said})",
        "a step that trains needs statistics of several values",
        f"use {helps or _LARGER}",
    )


@contextmanager
def global_statistics(model: nn.Module, group: Group, presence: Presence) -> Iterator[None]:
    """While open, every batch normalisation layer of ``model`` uses the statistics of the whole group.

    The layers stay the same objects of the same class with the same names; only their ``forward`` is replaced
    on the instance. Raises ``RefusedError`` for a subclass that computes its own forward.
    """

    found: list[tuple[Any, Forward]] = [
        (layer, GlobalNorm(layer, group, presence, name)) for name, layer in replaceable_layers(model)
    ]
    with standing_in(found, presence):
        yield


class GlobalNorm:
    """Computes one layer with the statistics of all ranks: see ``global_forward``.

    ``traced``: what a compiler sees of it while a step is compiled (``seen_by_compiler``), ``None`` where it
    sees nothing. What this holds is no part of what the host keeps of a step (``kway.step.attributes``).
    """

    __slots__ = ("as_it_is", "group", "module", "name", "presence", "traced", "was_traced")

    def __init__(self, module: _BatchNorm, group: Group, presence: Presence, name: str) -> None:
        self.module, self.group, self.presence, self.name = module, group, presence, name
        self.as_it_is: Forward = self.computed
        self.traced: tuple[GatherOperation, Chain] | None = None
        # From then on running statistics may be rounded otherwise than on a rank whose layer runs as it is.
        self.was_traced = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for x of shape (N, C, ...)."""
        if self.traced is not None and torch.compiler.is_compiling() and self._is_plain(x):
            self.module._check_input_dim(x)  # type: ignore[no-untyped-call]
            self.presence.meeting.in_code = True
            return normalised(self.module, x, *self.traced, self.name)
        return self.as_it_is(x)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        """Return it, computed one operation after another."""
        return global_forward(self.module, x, self.group, self.presence, self.name)

    def _is_plain(self, x: torch.Tensor) -> bool:
        """Whether this is a share that counts, with several values a channel, that trains a layer as most are."""
        module = self.module
        counts = self.presence.counts and not self.presence.apart
        several = x.dim() > 1 and x.numel() > x.size(1)
        return counts and module.training and module.momentum is not None and several


@contextmanager
def seen_by_compiler(model: nn.Module, device: torch.device) -> Iterator[set[nn.Module]]:
    """While open, a compiler sees what ``GlobalNorm`` layers compute, where it can, but for the gathers. Yield them.

    Not where ranks are threads, which take turns.
    """
    disable: Any = torch.compiler.disable
    found = {module: norm for _, module in layers(model) if (norm := global_norm_of(module)) is not None}
    found = {module: norm for module, norm in found.items() if not norm.group.one_process}
    made: dict[Group, tuple[GatherOperation, Chain]] = {}
    with ExitStack() as undo:
        for norm in found.values():
            if norm.group not in made:
                operation, chain = made[norm.group] = GatherOperation(norm.group), Chain(device)
                undo.callback(operation.close)
                norm.presence.begins.append(chain.begin)
                undo.callback(norm.presence.begins.remove, chain.begin)
            undo.callback(setattr, norm, "traced", None)
            undo.callback(setattr, norm, "as_it_is", norm.as_it_is)
            norm.traced, norm.was_traced, norm.as_it_is = made[norm.group], True, disable(norm.computed)
        yield {*found}


def global_norm_of(module: nn.Module) -> GlobalNorm | None:
    """Return what computes a layer with the statistics of all ranks now, if anything does."""
    place = stand_in_of(module)
    forward = None if place is None else place.forwards[-1]
    return forward if isinstance(forward, GlobalNorm) else None


def held_alike(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return ids of buffers that ``global_statistics`` makes equal on all ranks: to the bit, and but for rounding.

    The second are those of layers that a compiler has seen: a rank without samples computes them as they are.
    """
    exact, rounded = set[int](), set[int]()
    for _, module in layers(model):
        norm = global_norm_of(module)
        held = rounded if norm is not None and norm.was_traced else exact
        held.update(id(buffer) for buffer in module.buffers())
    return exact - rounded, rounded


def global_forward(
    module: _BatchNorm, x: torch.Tensor, group: Group, presence: Presence, name: str
) -> torch.Tensor:
    """Compute ``module(x)`` for x of shape (N, C, ...) with the statistics of all ranks' x.

    ``name``: the layer's, by which ranks see that they are at the same one. A collective wherever the layer uses
    batch statistics. Raises ``ValueError`` where the global batch has only one value a channel, as torch does.
    """
    if presence.apart:
        # What all ranks hold counts once.
        alone: torch.Tensor = _BatchNorm.forward(module, x)
        return alone
    module._check_input_dim(x)  # type: ignore[no-untyped-call]
    by_batch = module.training or (module.running_mean is None and module.running_var is None)
    if not by_batch:
        held = module.running_mean, module.running_var
        return nn.functional.batch_norm(x, *held, module.weight, module.bias, False, 0.0, module.eps)
    moves = module.training and module.track_running_stats
    if moves and module.running_mean is not None and x.size(1) != len(module.running_mean):
        raise RuntimeError(
            f"batch normalisation of {len(module.running_mean)} channels got {x.size(1)} (input {tuple(x.shape)})"
        )
    rows = gather_statistics(x, group, presence.counts, presence.arithmetic, name)
    # Reading the count waits for the device: only a share this small can mean that the batch is too small.
    small = x.numel() <= x.size(1)
    if module.training and small and rows[:, -1].sum().item() == 1:
        raise ValueError(
            f"batch normalisation needs more than 1 value a channel to train, and the global batch has 1 "
            f"(input {tuple(x.shape)} on rank {group.rank}): use a larger batch"
        )
    running: Running = [None, None]
    factor = None
    if moves and not recomputing():
        running, factor = count_batch(module, presence.arithmetic, x.device)
    # Only for a small share can there be no value on any rank. A ghost may hold some then, and a rank never knows what
    # those of others hold: all go on, without a look at the count, and meet in backward.
    sure = not small and presence.counts
    inner = torch.promote_types(torch.float32, x.dtype)
    statistics = presence.arithmetic.combined(rows, running, factor, module.eps, inner, sure)
    y: torch.Tensor = Normalise.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.bias, statistics, module.eps, group, presence.counts, name
    )
    presence.meeting.add(y)
    return y
