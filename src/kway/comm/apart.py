"""Large gradients, which are sent from where backward left them instead of being copied into a flat vector."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from kway.comm.rows import write

Tensor = torch.Tensor

# From so many bytes on, a tensor that is sent beside others in one collective costs less than its copy: the gradients
# of ResNet-18 took 0.198 ms over two H200 so, 0.345 ms in one flat vector, copy and all, 0.287 ms each for itself.
APART_BYTES = 256 * 2**10

# A kernel over many tensors gives 65,536 entries to each block: with few of them one of 100,000 took 18 us on one H200,
# and 2 us by itself.
_TOGETHER_ENTRIES = 2**24

# How many tensors share a memory is a private part of torch: without it gradients are copied.
_count: Callable[[Any], int] | None = getattr(torch._C, "_storage_Use_Count", None)
# The gradient, and what is asked.
_NOBODY_ELSE = 2


class Apart:
    """What stands for the gradients of ``parameters`` while they are reduced; keys are places of parameters.

    That is the gradient itself, where it lies in memory as the parameter did and nobody else holds that memory. Else it
    is a tensor of this class's own: so no rank has to know how gradients of the others lie. ``parameters`` are such as
    ``can_lie_apart`` allows.
    """

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        # In the order of memory of now: it may change, but not among ranks at different times.
        self._like = {place: torch.empty_like(p, device="meta") for place, p in parameters.items()}
        self._own: dict[int, Tensor] = {}
        self._sent: dict[int, Tensor] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._parameters)

    def __contains__(self, place: object) -> bool:
        return place in self._parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all that lies here."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes of the tensors of this class's own, which stay from step to step."""
        return sum(own.nbytes for own in self._own.values())

    def take(self, places: Iterable[int], counts: bool, lends: bool) -> list[Tensor]:
        """Return flat tensors to be reduced in place: the gradients of those of ``places`` that are here, in order.

        Zeros where there is none, or none that counts. ``lends``: whether a gradient itself may be changed.
        """
        here = [place for place in places if place in self._parameters]
        for place in here:
            grad = self._parameters[place].grad if counts else None
            if lends and grad is not None and self._can_be_sent(grad, self._like[place]):
                self._sent[place] = grad.detach()
                self._own.pop(place, None)
            else:
                self._sent[place] = self._copied(place, grad)
        return [_flat(self._sent[place]) for place in here]

    def given(self, place: int) -> Tensor:
        """Return what was reduced in place of a gradient, shaped like it."""
        return self._sent[place]

    def forget(self) -> None:
        """Hold no gradient any longer."""
        self._sent.clear()

    def divide_(self, divisor: Tensor) -> None:
        """Divide the gradients that there are by a scalar tensor, in place."""
        found: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                found.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for dtype, grads in found.items():
            if sum(grad.numel() for grad in grads) >= _TOGETHER_ENTRIES:
                # In one kernel, which takes one dtype only.
                torch._foreach_div_(grads, divisor.to(dtype))
                continue
            for grad in grads:
                grad.div_(divisor)

    def _can_be_sent(self, grad: Tensor, like: Tensor) -> bool:
        return grad.dtype == like.dtype and lies_like(grad, like) and is_alone(grad)

    def _copied(self, place: int, grad: Tensor | None) -> Tensor:
        own = self._own.get(place)
        if own is None:
            own = torch.empty_like(self._like[place], device=self._parameters[place].device)
            self._own[place] = own
        if grad is None:
            own.zero_()
        elif grad.is_sparse or grad.data_ptr() != own.data_ptr():
            # Otherwise backward has added to what was handed out.
            write(grad, own)
        return own


def can_lie_apart(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter's gradient is large enough, and real and without gaps if it lies as the parameter does."""
    wanted = getattr(parameter, "grad_dtype", parameter.dtype)
    if parameter.nbytes < APART_BYTES or parameter.is_complex() or wanted != parameter.dtype:
        return False
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}.get(
        parameter.dim(), torch.contiguous_format
    )
    return parameter.is_contiguous() or parameter.is_contiguous(memory_format=formats)


def lies_like(grad: Tensor, like: Tensor) -> bool:
    """Whether a gradient lies in memory as a tensor of its shape does, entry by entry, which has no gaps."""
    if grad.layout != torch.strided or grad.is_complex() or grad.is_neg():
        return False
    strides = zip(grad.shape, grad.stride(), like.stride(), strict=True)
    # How far apart neighbours would be, of which there is one, does not matter.
    return all(one == other for size, one, other in strides if size > 1)


def is_alone(tensor: Tensor) -> bool:
    """Whether nobody else holds a tensor's memory, as who gets the same gradient as a view does."""
    storage = tensor.untyped_storage()
    return _count is not None and _count(storage._cdata) == _NOBODY_ELSE


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
