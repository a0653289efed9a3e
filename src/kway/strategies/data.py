"""Data parallelism: every rank holds the whole model and a share of the global batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from kway.comm.buckets import BUCKET_BYTES, usual_bytes
from kway.comm.group import Group
from kway.comm.reduce import GradientReducer
from kway.cost.estimate import Estimate
from kway.cost.gradients import add_gradient_sums
from kway.errors import UsageError
from kway.flat import flat
from kway.job import Job
from kway.step.batchnorm import global_statistics, held_alike
from kway.step.gradients import sparse_parameters
from kway.step.kinds import KINDS
from kway.step.numbers import length
from kway.step.open_jobs import OpenJob
from kway.step.pieces import cuts_code
from kway.strategies.base import Axis, Part
from kway.strategies.replicas import check_replicas, compare_shapes, rounds_as

# Of running statistics: each step's may differ by one, and they fade.
_ROUNDINGS = 64


class Data(Axis):
    """``data=k``: gradients are summed over k ranks, with the weights of the samples they held."""

    name: ClassVar[str] = "data"
    aliases: ClassVar[tuple[str, ...]] = ("ddp",)
    order: ClassVar[int] = 90
    splits_batch: ClassVar[bool] = True
    levels: ClassVar[frozenset[str]] = frozenset({"math", "bits", "loose"})

    def sizes(self, devices: int) -> list[int]:
        """Any number of devices works: shares may be uneven or empty."""
        return list(range(1, devices + 1))

    def refuses(self, job: Job, model: nn.Module, size: int, level: str) -> str | None:
        """Refuse what changes weights in a forward pass: each rank would change those of its own samples.

        A level that it does not know is refused before.
        """
        for name, module in model.named_modules():
            if (
                size > 1
                and isinstance(module, nn.Embedding | nn.EmbeddingBag)
                and module.max_norm is not None
            ):
                return (
                    f"embedding {name!r} with max_norm={module.max_norm} shortens the rows that a forward pass "
                    "looks up, and every device looks up others; use one device, or leave max_norm out"
                )
        return None

    def apply(self, part: Part, group: Group) -> None:
        """Start all ranks from the same values, share batch statistics, and sum gradients."""
        if group.size == 1:
            return
        compare_shapes(part.model, group)
        synchronise(part.model, group, bring_together(part.beside, part.model, group))
        check_trained(part.model, group)
        if part.global_statistics:
            part.opened.enter_context(global_statistics(part.model, group, part.presence))
        gradients = Gradients(part.model, group, scalars=length(part.shares), limit=part.bucket_bytes)
        part.reducer = gradients
        # Bits hold within one kind of device, the other levels within anything.
        alike = part.level == "bits" or len(set(group.objects(rounds_as(part.device)))) == 1
        notes = None if alike else part.notes
        part.checks.append(partial(check_replicas, part.model, group, part.device, notes))
        part.equalise.append(partial(equalise_buffers, part.model, group, part.level != "loose"))

    def price(self, estimate: Estimate, size: int, devices: Sequence[str]) -> None:
        """Add the sums of gradients, in buckets, and what the level gathers: see ``add_gradient_sums``.

        What is compiled as one piece hands over all gradients at its end: see ``kway.step.pieces``.
        """
        compiles, device = KINDS[estimate.step_kind].compiles, "cpu" if estimate.on_cpu else "cuda"
        cuts = cuts_code(compiles, device, size, estimate.workload.level)
        bucket = usual_bytes(int(estimate.workload.parameters["gradient_bytes"]), cuts)
        # Steps are counted in kind eager, whose buckets do not grow with the model.
        add_gradient_sums(
            estimate, size, bucket, hides=cuts or not compiles, as_counted=bucket == BUCKET_BYTES
        )


class Gradients:
    """The gradients of a model over a group, whatever parameters the model has at the time of the step."""

    def __init__(self, model: nn.Module, group: Group, scalars: int, limit: int | None = None) -> None:
        self._model, self._group, self._scalars, self._limit = model, group, scalars, limit
        # Made with the first step: not every level sums gradients this way, and it holds a copy of them.
        self._reducer: GradientReducer | None = None
        self._sent = False

    @property
    def sends_ahead(self) -> bool:
        """Whether anything can be sent before backward has ended: unknown before the first step."""
        return self._reducer is None or self._reducer.sends_ahead

    @property
    def kept_bytes(self) -> tuple[int, int] | None:
        """Bytes that stay beside the gradients: see ``GradientReducer.kept_bytes``; ``None`` before the first step."""
        return None if self._reducer is None else self._reducer.kept_bytes

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send ahead what is complete inside: see ``GradientReducer.sending``. From the second step on."""
        if self._reducer is None:
            yield
            return
        self._update()
        with self._reducer.sending():
            yield
        # The same for ``reduce``, whatever was frozen meanwhile.
        self._sent = True

    def reduce(self, numbers: torch.Tensor, counts: bool) -> torch.Tensor:
        """Sum gradients and numbers over the ranks: see ``GradientReducer.reduce``."""
        sent, self._sent = self._sent, False
        reducer = self._reducer if sent and self._reducer is not None else self._update()
        return reducer.reduce(numbers, counts)

    def _update(self) -> GradientReducer:
        """Return the reducer of the parameters that are trained now."""
        # Not the frozen ones: they would travel as zeros.
        held = [parameter for _, parameter in self._model.named_parameters()]
        now = [parameter for parameter in held if parameter.requires_grad]
        old = [] if self._reducer is None else self._reducer.parameters
        if (
            self._reducer is None
            or len(now) != len(old)
            or any(a is not b for a, b in zip(now, old, strict=True))
        ):
            frozen = [parameter for parameter in held if not parameter.requires_grad]
            tables = sparse_parameters(self._model)
            self._reducer = GradientReducer(now, self._group, self._scalars, tables, frozen, self._limit)
        return self._reducer

    def divide_(self, divisor: torch.Tensor) -> None:
        """Divide all gradients by a scalar tensor."""
        if self._reducer is not None:
            self._reducer.divide_(divisor)


def bring_together(jobs: list[OpenJob], model: nn.Module, group: Group) -> set[int]:
    """Let open jobs see that ranks hold their models alike, as each does itself; return the ids of their parameters.

    Nothing where ranks have other jobs open over ``model`` than each other: one of them has a copy. A collective.
    Raises ``ReplicaError`` where weights differ, and ``RefusedError`` where buffers do at level bits.
    """
    held = {id(parameter) for job in jobs for parameter in job.model.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in held]
    if any(others != (len(jobs), names) for others in group.objects((len(jobs), names))):
        return set()
    for job in jobs:
        job.equalise()
    return held


@torch.no_grad()
def synchronise(model: nn.Module, group: Group, held: set[int]) -> None:
    """Give every rank the first rank's parameters and buffers, but for parameters whose ids are in ``held``.

    What an open job trains is the same on all ranks, or an error: see ``bring_together``. Nobody compares the running
    statistics that a job makes alike by how it computes them.
    """
    for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) in held:
            continue
        whole = flat(tensor)
        group.broadcast_(whole)
        if whole.data_ptr() != tensor.data_ptr():
            _write(tensor, whole.view(tensor.shape))


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` of its shape into ``tensor``, of which one number may stand for several (``expand``)."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor, values = (
                held.narrow(dimension, 0, min(1, held.shape[dimension])) for held in (tensor, values)
            )
    tensor.copy_(values)


def check_trained(model: nn.Module, group: Group) -> None:
    """Raise ``UsageError`` where ranks train other parameters: gradients would not fit together. A collective."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for rank, others in enumerate(group.objects(trained)):
        if others != trained:
            name = min(set(trained).symmetric_difference(others), default=None)
            got = (
                f"parameter {name!r} is trained on one of ranks {group.rank} and {rank} and not on the other"
            )
            if name is None:
                got = f"ranks {group.rank} and {rank} train the same parameters in another order"
            raise UsageError(
                got,
                "all ranks must train the same",
                "make the model, and freeze parameters, alike on all ranks",
            )


@torch.no_grad()
def equalise_buffers(model: nn.Module, group: Group, one_batch: bool) -> list[str]:
    """Bring buffers that differ between ranks to one value; return their names.

    Floating-point buffers get the mean over the ranks, others the first rank's value. ``one_batch``: whether batch
    normalisation sees the global batch. Its statistics are equal by construction then, and left alone; those that may
    differ by rounding all the same (``held_alike``) are brought to one value without a name, which that is not worth.
    Ranks hold buffers of the same shapes: see ``check_replicas``.
    """
    exact, rounded = held_alike(model) if one_batch else (set[int](), set[int]())
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in exact}
    changed = []
    for dtype in {buffer.dtype: None for buffer in buffers.values()}:
        names = [name for name, buffer in buffers.items() if buffer.dtype == dtype and buffer.numel()]
        if not names:
            continue
        reals = [torch.view_as_real(b) if b.is_complex() else b for b in (buffers[name] for name in names)]
        # One collective and one look for all buffers of a kind: a GPU is slow to start many small ones.
        joined = torch.cat([real.reshape(-1) for real in reals])
        every = group.stack(joined)
        lengths = [real.numel() for real in reals]
        # By bytes: no number is unlike itself, and some dtypes cannot be compared.
        plain = every.view(torch.uint8).view(group.size, joined.numel(), joined.element_size())
        differ = torch.split((plain != plain[0]).flatten(2).any(2).any(0).cpu(), lengths)
        odd = [place for place, own in enumerate(differ) if bool(own.any())]
        if not odd:
            continue
        changed += [
            names[place]
            for place in odd
            if id(buffers[names[place]]) not in rounded or not _rounded(torch.split(every, lengths, 1)[place])
        ]
        # All at once here too; only those that differ are written, since a mean may round what is equal.
        values = every.double().mean(0).to(joined.dtype) if joined.is_floating_point() else every[0]
        parts = torch.split(values, lengths)
        torch._foreach_copy_(
            [reals[place] for place in odd], [parts[place].view(reals[place].shape) for place in odd]
        )
    return [name for name in buffers if name in changed]


def _rounded(rows: torch.Tensor) -> bool:
    """Whether rows (ranks, n) of one buffer differ by no more than the rounding of a few operations."""
    if not rows.is_floating_point():
        return False
    away = (rows.double() - rows[0].double()).abs().max()
    return bool(away <= _ROUNDINGS * torch.finfo(rows.dtype).eps * rows.double().abs().max())


AXIS = Data()
