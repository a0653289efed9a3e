"""What a step computes and keeps: floating-point operations and bytes by layer, counted in one step."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from kway.data.share import Share
from kway.profiling.layers import LOSS, Layers
from kway.step.core import StepCore
from kway.step.holdings import dense_parts

Tensor = torch.Tensor


@dataclass
class Counts:
    """By layer: ``flop`` of forward and backward, ``kept`` bytes for backward, ``moved`` bytes in and out of forward.

    ``uncounted``: names of operations that may compute much and that nothing is known of; ``layers`` that ran.
    """

    flop: dict[str, float] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    uncounted: set[str] = field(default_factory=set)

    @property
    def all_flop(self) -> float | None:
        """All operations, ``None`` where some could not be counted."""
        return None if self.uncounted else float(sum(self.flop.values()))


class Counter:
    """Counts while the steps of a model run inside of ``around`` (see ``phases.Phases``).

    ``unfused``: without the kernels that hide the products of recurrent layers, which keep other tensors.
    """

    def __init__(self, model: torch.nn.Module, share: Share, unfused: bool = False) -> None:
        self.counts, self._unfused = Counts(), unfused
        self._name = LOSS
        # A copy of weights in a layer's cast counts, weights and batch are there anyway.
        there = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(share.micro)]
        self._seen = {address for tensor in there for address, _ in pieces(tensor)}
        self._layers = Layers(model, self._turn, self._moved)

    @contextmanager
    def around(self, part: str, core: StepCore, args: tuple[Any, ...]) -> Iterator[None]:
        """Count what runs while open."""
        with ExitStack() as open_:
            open_.enter_context(self._layers.around(part, core, args))
            if part in ("forward", "backward"):
                backends: Any = torch.backends
                for backend in (backends.mkldnn, backends.cudnn) if self._unfused else ():
                    open_.enter_context(_switched_off(backend))
                open_.enter_context(_Flop(self._computes))
            if part == "forward":
                open_.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keeps, _as_it_is))
            yield

    def _turn(self, name: str | None) -> None:
        self._name = LOSS if name is None else name

    def _computes(self, flop: float, unknown: str) -> None:
        if unknown:
            self.counts.uncounted.add(unknown)
        self.counts.flop[self._name] = self.counts.flop.get(self._name, 0.0) + flop

    def _keeps(self, tensor: Tensor) -> Tensor:
        for address, size in pieces(tensor):
            if address not in self._seen:
                self._seen.add(address)
                self.counts.kept[self._name] = self.counts.kept.get(self._name, 0) + size
        return tensor

    def _moved(self, name: str, args: Any, result: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        self.counts.moved[name] = self.counts.moved.get(name, 0) + sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _switched_off(backend: Any) -> Iterator[None]:
    """Leave a back end of torch out while open, its other flags as they are."""
    before, *_ = backend.set_flags(False)
    try:
        yield
    finally:
        backend.set_flags(before)


def pieces(value: Any) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the memory in which a tensor lies, views as a whole."""
    for tensor in dense_parts(value):
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            # Classes of tensors without memory of their own have none to show.
            continue
        if size:
            yield address, size


def _as_it_is(kept: Tensor) -> Tensor:
    return kept


# Operations that are products inside, and that torch's counter has no formula for; but not those that only follow them.
_HIDES, _FOLLOW = ("rnn", "lstm", "gru", "flex_"), ("_thnn_fused",)
_ATTENTION: Any = sdpa_flop
_ATTENTION_BACKWARD: Any = sdpa_backward_flop


class _Flop(TorchDispatchMode):
    """Tells the floating-point operations of each call, by the formulas of torch's own counter (two a multiply-add)."""

    def __init__(self, tell: Callable[[float, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        formula = flop_registry.get(packet)
        name = packet.__name__
        if formula is not None:
            self._tell(float(formula(*args, **kwargs, out_val=result)), "")
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            self._tell(float(_ATTENTION(*args[:3])), "")
        elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            self._tell(float(_ATTENTION_BACKWARD(*args[:4])), "")
        elif any(part in name for part in _HIDES) and not name.startswith(_FOLLOW):
            self._tell(0.0, name)
        return result
