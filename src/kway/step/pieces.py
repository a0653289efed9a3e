"""Compiled code in pieces, so that gradients are there before backward ends.

What is compiled as one piece hands over all of its gradients at its end, when nothing is left that could hide their
reduction.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from kway.comm.buckets import usual_bytes
from kway.step.kinds import kind_of
from kway.step.settings import Settings

# In torch 2.11 to 2.13 the part of its compiler that cuts a graph where a bucket of gradients is full.
_MODULE, _CUTTER = "torch._dynamo.backends.distributed", "DDPOptimizer"


def cuts_code(compiles: bool, device: str, shares: int, level: str) -> bool:
    """Whether a model that ``compiles`` is cut where a bucket is full, where nobody chose (``Settings.overlap``).

    Only where there is a reduction to hide: over several ``shares`` of a batch. On GPUs alone (``device`` is a type):
    on a CPU the processors that would reduce are those that compute. Not at ``level`` bits: one device, with nothing to
    hide, must round alike.
    """
    return compiles and device == "cuda" and shares > 1 and level != "bits"


def piece_bytes(
    settings: Settings, device: torch.device, kind: str, model: nn.Module, shares: int, level: str
) -> int | None:
    """Return after how many bytes of parameters compiled code is cut, and buckets are full; ``None``: it is not cut.

    ``shares`` of a batch and ``level``: see ``cuts_code``, which decides where nobody chose.
    """
    compiles = kind_of(kind).compiles
    wanted = cuts_code(compiles, device.type, shares, level) if settings.overlap is None else settings.overlap
    if not (wanted and compiles):
        return None
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return settings.bucket_bytes or usual_bytes(gradients, cuts_code=True)


def in_pieces(size: int, options: dict[str, Any]) -> Callable[..., Any] | None:
    """Return a back end of ``torch.compile`` that cuts a model's graph after about ``size`` bytes of parameters.

    It goes from the end of the graph to its beginning, as backward does. ``options``: of the compiler. ``None`` where
    this torch has no such part.
    """
    try:
        cutter: Any = getattr(import_module(_MODULE), _CUTTER)
        compiler: Any = import_module("torch._inductor.compile_fx").compile_fx
    except (ImportError, AttributeError):
        return None
    one = partial(compiler, config_patches=options)

    def compiled(graph: Any, inputs: Any) -> Any:
        try:
            # One for each graph: it notes the pieces of the one it has cut.
            return cutter(size, one, first_bucket_cap=size).compile_fn(graph, inputs)
        except NotImplementedError:
            # Graphs within the graph, as those of activation checkpointing, were not always cut.
            return one(graph, inputs)

    return compiled
