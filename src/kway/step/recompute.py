"""Activation checkpointing of a model's blocks: what lies between their ends is not kept, but computed again."""

import random
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointError

from kway.errors import KwayError, RefusedError, line_of

# The function of torch's that runs a block again when backward asks for what it has not kept.
_FILE, _ASKS = str(torch.utils.checkpoint.__file__), "unpack_hook"


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated parts of a model by name: the items of its outermost lists that hold several of one class.

    A list is an ``nn.ModuleList`` or ``nn.Sequential``; items without parameters are no blocks. Empty where the model
    has none.
    """
    return list(_blocks("", model))


def _blocks(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    held = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    trained = [(name, child) for name, child in held if next(child.parameters(), None) is not None]
    if isinstance(module, nn.ModuleList | nn.Sequential):
        # Single layers keep little beside their input: to compute them again would bring nothing.
        deep = [(name, child) for name, child in trained if next(child.children(), None) is not None]
        if len(deep) > 1 and len({type(child) for _, child in deep}) == 1:
            yield from deep
            return
    for name, child in trained:
        yield from _blocks(f"{name}.", child)


def left_alone(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that ``recompute`` would take: whose ``forward`` nobody has replaced, nor kway itself."""
    return [block for _, block in blocks_of(model) if "forward" not in vars(block)]


def recomputes(model: nn.Module) -> bool:
    """Whether blocks of ``model`` are computed again in backward now, by ``recompute``."""
    return any(getattr(vars(block).get("forward"), "func", None) is _again for _, block in blocks_of(model))


def recompute(model: nn.Module, undo: ExitStack) -> int:
    """Let the blocks of ``model`` keep their inputs alone until ``undo`` ends; return how many there are.

    In training only. Random numbers, NumPy's and Python's too, are drawn again as they were; buffers are kept by
    ``kway.step.checkpointing``. A block whose own ``forward`` somebody has replaced is left alone.
    """
    blocks = left_alone(model)
    for block in blocks:
        vars(block)["forward"] = partial(_again, block, block.forward)
        undo.callback(vars(block).pop, "forward", None)
    return len(blocks)


def not_again(error: BaseException, model: nn.Module) -> RefusedError | None:
    """Return what to raise in place of an exception that says that blocks of ``model`` came out otherwise the second
    time; ``None`` for any other one.

    Not where memory, a device or a peer was lost meanwhile, which says nothing of the block.
    """
    # Of others what torch says of shapes that do not fit: those of the user's own code come through as they are.
    if (
        isinstance(error, KwayError)
        or type(error) not in (CheckpointError, RuntimeError)
        or not recomputes(model)
    ):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, CheckpointError):
        inside = any(frame.f_code.co_name == _ASKS and frame.f_code.co_filename == _FILE for frame in frames)
        lost = any(frame.f_globals.get("__name__", "").startswith("kway.comm.") for frame in frames)
        if lost or not inside:
            return None
    return RefusedError(
        f"recompute with a {type(model).__name__} whose blocks cannot be computed again in backward "
        f"({line_of(error).rstrip('.')})",
        "what a block does must go by its inputs alone, and one that appends to a cache of keys and values finds it "
        "longer the second time",
        "leave recompute out, or switch that off: config.use_cache=False in models of transformers",
    )


def _again(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    more: dict[str, Any] = {}
    if not torch.compiler.is_compiling():
        more["context_fn"] = partial(_drawing_alike, _host_states())
    return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)


def _host_states() -> tuple[Any, Any]:
    """Return the states of the generators that torch does not look after: Python's and NumPy's."""
    return random.getstate(), np.random.get_state()


def _set_host_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _drawing_alike(states: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return what is open around a block as it runs first, and as it runs again: then it draws what it drew."""

    @contextmanager
    def again() -> Iterator[None]:
        now = _host_states()
        _set_host_states(states)
        try:
            yield
        finally:
            _set_host_states(now)

    return nullcontext(), again()
