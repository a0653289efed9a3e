"""The reference: what one device gives, in plain torch.

It shares no arithmetic with what it judges: nothing here comes from train, comm or strategies, nor the loss,
normalisation or step of ``kway.step``. Only the way a batch reaches a model is the same function.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from kway.job import Job
from kway.proving.attributes import Kept, attributes_of, give_back
from kway.step.hooked_losses import loss_beside
from kway.step.inputs import move, splitter
from kway.step.modes import begin_training
from kway.step.penalty import one_number
from kway.step.precision import cast

# Nudged parameters are off by this many roundings. A difference may be as large as 16 times the noise, and so 4 times
# what they make: which activations change sides is chance, and a jump of one step says little of the next one's size.
NUDGE = 16
NUDGES = 2
SHARE = 4
# In float64, where that is too rare, once and by so many, and all of it counts: 16 times 4 is the 64 of every tensor.
NUDGE_OF_DOUBLES = NUDGE // SHARE
State = dict[str, torch.Tensor]
Held = list[tuple[nn.Module, dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]]]
# Advances at an evaluation, of which a proof has none.
_BY_METRIC = torch.optim.lr_scheduler.ReduceLROnPlateau
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Snapshot:
    """One step of the reference. ``before``: model and optimizer tensors; ``after``: also loss and gradients.

    ``noise``: for each tensor, the largest difference that other orders of the same samples made, or what parameters
    made that are off by 4 roundings, elsewhere than in float64 a quarter of what those made that are off by 16,
    whichever is larger. ``drift``: by how
    much the loss of the same batch, in the same order and from the same state, differed the second time. It is
    looked at only where other orders changed half of the digits of the loss. ``mixes``: whether other orders give
    another loss by more than rounding of what the model returned: they say nothing of noise then, and are not in it.
    """

    before: State
    after: State
    noise: dict[str, float]
    drift: float = 0.0
    mixes: bool = False


class _Saved(NamedTuple):
    """What a step starts from. ``model``, ``optimizer``: what they save themselves, which may lack some of the rest."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    parameters: Sequence[tuple[torch.Tensor, torch.Tensor]]
    buffers: Held
    attributes: Kept
    states: dict[Any, Any]


class Reference:
    """A plain training loop over whole batches on one device.

    Its tensors go by ``loss``, ``gradient/NAME``, ``model/NAME`` and ``optimizer/NAME/ENTRY``.
    """

    def __init__(self, job: Job, model: nn.Module, device: torch.device) -> None:
        self.job, self.device = job, device
        self.floating = torch.float64 if job.precision == "fp64" else None
        self.model = begin_training(cast(model, self.floating).to(device))
        self.optimizer = job.optimizer(self.model.named_parameters())
        self.schedule = job.schedule(self.optimizer) if job.schedule is not None else None
        self.split = splitter(job.inputs, job.target, job.loss is not None)
        self.loss = _on(job.loss, self.model, device, self.floating)
        # The largest magnitude that the model returned last.
        self._returned = 0.0

    def steps(self, batches: Iterator[Sequence[Any]]) -> Iterator[Snapshot]:
        """Yield a snapshot for each item: the same batch as it is, first, and in other orders of its samples."""
        for own, *others in batches:
            before, saved = self._tensors(), self._saved()
            other_results = []
            for place, batch in enumerate(others):
                # The last of the other orders also interleaves channels with pixels: sums over pixels, of which
                # batch normalisation is made, do not notice in which order samples come.
                # Not in float64 on a GPU: there it takes minutes, and rounding flips no activation worth the wait.
                slow = self.floating == torch.float64 and self.device.type == "cuda"
                last = place == len(others) - 1 and not slow
                if last:
                    self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                self._step(batch)
                if last:
                    self.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
                other_results.append(self._last)
                self._restore(saved)
            nudges = NUDGES if self.floating is None else 1
            nudged = [self._nudged(own, saved, seed) for seed in range(nudges if others else 0)]
            self._step(own)
            loss = self._last["loss"]
            nudged = [each for each in nudged if self._is_rounding(loss, each["loss"])]
            spread = max((largest(loss, o["loss"]) for o in other_results), default=0.0)
            drift, mixes = 0.0, False
            if spread > torch.finfo(loss.dtype).eps ** 0.5 * float(loss.abs()):
                # So much is no rounding, but for a loss that is zero in mathematics, which comes out the same again.
                self._restore(saved)
                self._step(own)
                drift = largest(loss, self._last["loss"])
                # A loss that is zero in mathematics is rounding of what it is made of.
                mixes = not drift and spread > self._eps(loss) ** 0.5 * max(float(loss.abs()), self._returned)
            if mixes:
                # A sample counts by its place, as in a sum along the batch: devices change that.
                other_results = []
            if self.schedule is not None and not isinstance(self.schedule, _BY_METRIC):
                self.schedule.step()
            share = SHARE if self.floating is None else 1
            noise = {name: max([0.0, *(largest(value, o[name]) for o in other_results),
                                *(largest(value, o[name]) / share for o in nudged)])
                     for name, value in self._last.items()}  # fmt: skip
            yield Snapshot(before, self._last, noise, drift, mixes)

    def _nudged(self, batch: Any, saved: _Saved, seed: int) -> State:
        """Return what the batch gives where every parameter is some roundings larger or smaller, by chance.

        Rounding elsewhere than in sums (of normalisation, of products) puts activations on the other side of zero,
        too, and a gradient then jumps. And in other orders a sample is computed as it was, to the bit: a gradient that
        is zero in mathematics for each sample, such as that of the bias of the keys of attention, is rounding of those
        computations, which Adam makes a step of. Only what changes them shows its noise.
        """
        generator = torch.Generator().manual_seed(seed)
        roundings = NUDGE if self.floating is None else NUDGE_OF_DOUBLES
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    up = torch.randint(2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                    parameter.mul_(1 + up * (roundings * torch.finfo(parameter.dtype).eps))
        self._step(batch)
        result = self._last
        self._restore(saved)
        return result

    def _is_rounding(self, loss: torch.Tensor, nudged: torch.Tensor) -> bool:
        """Whether a nudge moved the loss by no more than half of its digits.

        What lies on an edge (a bound that is compared with whole numbers, a sign that is cut off) falls over it by the
        smallest nudge. That jump is no rounding, and devices do not make it: it must not hide what they make wrong.
        """
        return largest(loss, nudged) <= float(self._eps(loss) ** 0.5 * loss.abs())

    def _eps(self, loss: torch.Tensor) -> float:
        """Return that of what a step computes in."""
        return torch.finfo(_AUTOCAST.get(self.job.precision) or loss.dtype).eps

    def _saved(self) -> _Saved:
        with torch.no_grad():
            parameters = [(parameter, parameter.detach().clone()) for parameter in self.model.parameters()]
        states = {key: copy.deepcopy(entries) for key, entries in self.optimizer.state.items()}
        whole = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        return _Saved(*whole, parameters, buffers_of(self.model), attributes_of(self.model), states)

    def _restore(self, saved: _Saved) -> None:
        # Buffers by themselves, and first: not all are in the state_dict, and a step may have made new ones.
        _put_back(saved.buffers)
        give_back(saved.attributes)
        self.model.load_state_dict(saved.model)
        with torch.no_grad():
            for parameter, value in saved.parameters:
                parameter.copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))
        if type(self.optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            # torch gives what it loads the type of the parameter, also where a step keeps another one (NAdam).
            self.optimizer.state.clear()
            self.optimizer.state.update({key: copy.deepcopy(each) for key, each in saved.states.items()})

    def _step(self, batch: Any) -> None:
        lower = _AUTOCAST.get(self.job.precision)
        # Of the whole model: an optimizer may hold a part of it, and what piles up on the rest is no noise.
        self.model.zero_grad()
        self.optimizer.zero_grad()
        # Without the cache every use of a weight casts it by itself, and gradients of several uses add in float32.
        with torch.autocast(self.device.type, lower, cache_enabled=False) if lower else nullcontext():
            output, target = self.forward(batch)
            loss = _scalar(output if self.loss is None else self.loss(output, target))
        self._returned = max([0.0, *map(_size_of, tree_leaves(output))])
        if self.job.penalty is not None:
            loss = loss + one_number(self.job.penalty(self.model))
        held = buffers_of(self.model)
        loss.backward()
        # A checkpointed part ran again inside backward. One device should count a batch once.
        _put_back(held)
        for _, parameter in self.model.named_parameters():
            if parameter.grad is not None and parameter.grad.is_conj():
                # Not all of torch's functions over many tensors take a conjugate view.
                parameter.grad = parameter.grad.resolve_conj()
        self._clip()
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self._last = {"loss": loss.detach().cpu().clone()}
        self._last |= {f"gradient/{name}": _plain(grad) for name, grad in gradients.items()}
        self.optimizer.step()
        self._last |= self._tensors()

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Return output and target of one whole batch."""
        args, kwargs, target = self.split(move(batch, self.device, self.floating))
        return self.model(*args, **kwargs), target

    def _clip(self) -> None:
        clip = self.job.clip
        if clip is None:
            return
        kind, limit = clip if isinstance(clip, tuple) else ("norm", clip)
        parameters = [
            parameter for _, parameter in self.model.named_parameters() if parameter.grad is not None
        ]
        for parameter in parameters:
            assert parameter.grad is not None
            # Of a sum of views both gradients may lie in one memory: torch would clip that twice.
            parameter.grad = parameter.grad.clone()
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            _clip_rows(parameters, kind, limit)
            return
        clipper = nn.utils.clip_grad_norm_ if kind == "norm" else nn.utils.clip_grad_value_
        clipper(parameters, limit)

    def _tensors(self) -> State:
        # Beside the state_dict, which leaves out buffers that are not persistent.
        held = {**dict(self.model.named_buffers()), **self.model.state_dict()}
        model = {f"model/{n}": v for n, v in held.items() if isinstance(v, torch.Tensor)}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        optimizer = {
            f"optimizer/{names[parameter]}/{entry}": value
            for parameter, entries in self.optimizer.state.items()
            for entry, value in entries.items()
            if isinstance(value, torch.Tensor | int | float)
        }
        return {name: _plain(value) for name, value in {**model, **optimizer}.items()}


def _plain(value: torch.Tensor | float) -> torch.Tensor:
    """Copy a tensor to the CPU, a sparse one with its zeros; make a tensor of a number."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    value = value.detach().cpu()
    return value.to_dense() if value.is_sparse else value.clone()


def _clip_rows(parameters: list[nn.Parameter], kind: str, limit: float) -> None:
    """Clip gradients of which some are sparse, which torch's own functions do not take."""
    numbers = []
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        numbers.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
    norm = torch.stack([number.abs().square().sum() for number in numbers]).sum().sqrt()
    for number in numbers:
        if kind == "norm":
            number.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        else:
            number.clamp_(-limit, limit)


def buffers_of(model: nn.Module) -> Held:
    """List every module with its buffers: by name, the tensor itself and a copy of its values."""
    return [
        (module, {n: (b, None if b is None else b.detach().clone()) for n, b in module._buffers.items()})
        for module in model.modules()
    ]


@torch.no_grad()
def _put_back(held: Held) -> None:
    for module, buffers in held:
        for name in [name for name, _ in module._buffers.items() if name not in buffers]:
            delattr(module, name)
        for name, (buffer, values) in buffers.items():
            if buffer is not None and values is not None:
                buffer.copy_(values)
            module._buffers[name] = buffer


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference between two tensors of one shape; NaN where only one of them has a NaN."""
    if not a.numel():
        return 0.0
    if a.is_floating_point() or a.is_complex():
        difference = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0)
        return float(difference.max())
    return float((a.double() - b.double()).abs().max())


def _size_of(value: Any) -> float:
    """Return the largest magnitude in what is a tensor of numbers with fractions, 0 of anything else."""
    if not isinstance(value, torch.Tensor) or not value.numel() or not value.is_floating_point():
        return 0.0
    return float(value.detach().abs().max())


def _scalar(value: Any) -> Any:
    """Take the mean as a user of one device would: of per-sample losses, or as sum / weight."""
    if isinstance(value, tuple | list):
        return value[0] / value[1]
    return value if value.dim() == 0 else value.mean()


def _on(loss: Any, model: nn.Module, device: torch.device, floating: torch.dtype | None) -> Any:
    """Put what a loss holds on the device: a copy, but where hooks or functions of the model write into the loss."""
    if isinstance(loss, nn.Module):
        return loss_beside(model, loss).to(device=device, dtype=floating)
    if isinstance(loss, partial):
        placed: Mapping[str, Any] = move(dict(loss.keywords), device, floating)
        return partial(loss.func, *loss.args, **placed)
    return loss
