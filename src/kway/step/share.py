"""One optimizer step over this rank's share of the global batch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from kway.comm.group import Group
from kway.comm.said import said
from kway.data.loader import Share
from kway.data.seeds import key
from kway.errors import RefusedError
from kway.job import Job
from kway.step.core import StepCore
from kway.step.endings import mean, plain, scaled
from kway.step.gradients import keep_apart, resolve_conjugates
from kway.step.kept_buffers import MICRO_BATCH, KeptBuffers
from kway.step.mispaired import check_calls
from kway.step.numbers import CALLS, WISHES, alone, rows, told, written
from kway.step.outcome import Outcome, apart
from kway.step.presence import Presence
from kway.step.seeds import Draws
from kway.step.tally import Tally, measure
from kway.step.telling import EACH_STEP, Telling

Tensor = torch.Tensor


class Reducer(Protocol):
    """Sums gradients over the ranks: see ``comm.reduce.GradientReducer``."""

    @property
    def sends_ahead(self) -> bool:
        """Whether anything can be sent before backward has ended, so far as that is known."""

    @property
    def kept_bytes(self) -> tuple[int, int] | None:
        """Bytes beside the gradients that stay, and what more did in the first steps; ``None`` where nobody knows."""

    def sending(self) -> AbstractContextManager[None]:
        """Send ahead what is complete while the last gradients of this rank are computed inside."""

    def reduce(self, numbers: Tensor, counts: bool) -> Tensor:
        """Sum gradients and a vector of numbers, the last one its own; return what adds up to these: (parts, n)."""

    def divide_(self, divisor: Tensor) -> None:
        """Divide all gradients by a scalar."""


class ShareStep(StepCore):
    """The arithmetic of a step: forward and backward over micro-batches, reduction, clipping, optimizer.

    ``group``: the ranks among which the batch is cut; ``place``: this rank's place among ``ranks`` shares.
    ``reducer``: ``None`` where one device holds the whole batch.
    ``keeps_buffers``: whether buffers move once a step, whatever the number of micro-batches.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        presence: Presence,
        group: Group,
        place: int = 0,
        ranks: int = 1,
        reducer: Reducer | None = None,
        keeps_buffers: bool = False,
        telling: Telling = EACH_STEP,
    ) -> None:
        super().__init__(job, model, optimizer, device, presence, group, telling)
        self.place, self.ranks = place, ranks
        self._reducer = reducer
        self.written, self.told = written, told
        # Whether backward passes so far had collectives of their own; unknown before the first one.
        self._alone: bool | None = None
        self.kept = KeptBuffers(model, [], MICRO_BATCH, self.attribute_doubts) if keeps_buffers else None

    def prepare(self, share: Share) -> bool:
        """Do what a step needs of the host before anything is computed: see ``StepCore.prepare``."""
        if self.presence.whole and len(share.micro) > 1:
            raise RefusedError(
                f"a batch of {share.total} samples in {len(share.micro)} micro-batches with batch normalisation",
                "the statistics of the global batch cannot be had from a batch that is cut in time (level math)",
                "use a larger micro_batch, more devices, or exactness loose",
            )
        return super().prepare(share)

    def seeds(self, share: Share, step: int) -> list[int]:
        """Return the one key of this rank in a step."""
        return [key(self.job.seed, "step", step, self.place)]

    def gradients(self, share: Share, draws: Draws, tally: Tally | None = None) -> Outcome:
        """Leave the gradient of the global batch on the parameters: see ``StepCore.gradients``."""
        draws.at(0)
        self.clear_gradients()
        sums = self._accumulate(share, tally)
        if self._whole(share):
            # Divided before backward: nothing is left to be.
            return Outcome(sums[0], sums[1], sums[2:], together=sums)
        parts, own = self._over_ranks(sums, share.count > 0)
        tells = own is not None
        # A CPU has the numbers at hand, and says at once which rank is wrong.
        compared = tells and self.signs.telling.compared
        compares = compared and parts.is_cuda
        # Not as a constant, which would be part of compiled code: sizes of batches may be many.
        nominal = self.presence.arithmetic.number(self.nominal(share.total), self.device, sums.dtype)
        numbers, divisor = self.told(
            parts, self.ranks, nominal, self.rule.averaged, tells, compares, sums.dtype
        )
        lengths = (self.ranks, self.ranks, self.ranks if tells else 0)
        loss, weight, losses, asked, calls = apart(numbers, lengths)
        if calls is not None and compared and not compares:
            check_calls(calls, own)
        self._rescale(divisor)
        if self._reducer is None:
            return Outcome(loss, weight, losses)
        return Outcome(loss, weight, losses, asked, calls, together=numbers)

    def compilable(self) -> list[tuple[Any, str, bool]]:
        """List what else is compiled with a step: see ``StepCore.compilable``."""
        return [*super().compilable(), (self, "written", False), (self, "told", False)]

    def _over_ranks(self, sums: Tensor, counts: bool) -> tuple[Tensor, int | None]:
        """Reduce gradients and numbers; return the numbers (see ``step.numbers``), and this rank's fingerprint.

        The latter is ``None`` in a step that does not tell it.
        """
        if self._reducer is None:
            return alone(sums).unsqueeze(0), None
        cells = self.signs.cells(self.device) if self.compiles else None
        if cells is not None:
            there, own = cells
            numbers = self.written(sums, there, self.place, self.ranks)
            return self._reducer.reduce(numbers, counts), own
        numbers = alone(sums, self.place, self.ranks)
        own_rows = rows(numbers, self.ranks)[:, self.place]
        told = self.signs.write(own_rows[CALLS], own_rows[WISHES])
        return self._reducer.reduce(numbers, counts), told

    def forget(self) -> None:
        """Take the buffers' values anew with the next step: see ``ShardStep.forget``."""
        if self.kept is not None:
            self.kept.forget()

    def kept_over(self, share: Share) -> KeptBuffers | None:
        """Return what keeps buffers over micro-batches, of which a share may have one: see ``StepCore.kept_over``."""
        return self.kept if len(share.micro) > 1 else None

    def _whole(self, share: Share) -> bool:
        """Whether one device can divide before backward. Not with a scaler: what overflows must not depend on it."""
        return self._reducer is None and len(share.micro) == 1 and self.scaler is None and share.count > 0

    def _accumulate(self, share: Share, tally: Tally | None) -> Tensor:
        """Run forward and backward over the micro-batches; return the sums of losses and of weights, shape (2,).

        Of a batch that is ``_whole``: mean or sum, weight, sum; shape (3,).
        """
        sums: Tensor | None = None
        self.presence.take(share)
        kept = self.kept_over(share)
        if kept is not None:
            kept.begin(self.modules)
        # Counting takes a while, and serves nothing where nothing can be sent ahead.
        counts = self._reducer is not None and self._reducer.sends_ahead
        ending = scaled if not self._whole(share) else mean if self.rule.averaged else plain
        micro = [piece for piece in share.micro if piece[1] or not share.count]
        for number, (batch, samples) in enumerate(micro):
            before = self._begun() if counts else 0
            held = self._added_up() if number else []
            # The scale keeps gradients at their usual magnitude; it is undone once they are reduced.
            counted, agrees = (1.0 if samples else 0.0), self.agrees and not self._whole(share)
            factor = counted if agrees else counted / self.nominal(share.total)
            output, target, objective, numbers = self.forward(batch, samples, ending, factor)
            if agrees:
                self.agree(numbers[1] if samples else None, samples)
                objective = objective * (1.0 / self.nominal(share.total))
            if held != (self._added_up() if number else []):
                raise RefusedError(
                    "a forward pass that clears or changes the model's gradients, with micro-batches",
                    "those of the micro-batches before add up there",
                    "use torch.autograd.grad in the forward pass, or leave micro_batch out",
                )
            # Not where forward has communicated, so that backward will, nor where a backward pass has: what is sent
            # ahead would come between in another order on each rank. All ranks have samples, or none of them sends.
            after = self._begun() if counts else 0
            is_last = number == len(micro) - 1 and share.total >= self.ranks
            ahead = is_last and bool(self._alone) and after == before
            with self._reducer.sending() if self._reducer is not None and ahead else nullcontext():
                self.backward(objective, output)
            if not ahead:
                # What was sent ahead has been copied, and is looked at again.
                keep_apart(self.parameters, more=number < len(micro) - 1)
            if counts and not ahead and self._alone is not False:
                self._alone = self._begun() == after
            if kept is not None:
                kept.end_of_piece()
            if not samples:
                # What does not count may be no number.
                numbers = torch.zeros_like(numbers)
            elif tally is not None:
                measure(self.job.metrics, output, target, samples, tally, self.place, self.right)
            sums = numbers if sums is None else sums + numbers
        if kept is not None:
            # A rank without samples has run all of its micro-batches on one that does not count.
            kept.end_of_step(self.group, idle=False)
        assert sums is not None
        return sums

    def _begun(self) -> int:
        """Return a number that grows with each collective of this rank: kway's own, and those of torch's groups.

        Of the latter ranks that are threads have none; the former do not count what a model calls by itself.
        """
        return said() + self.group.trace.begun

    def _added_up(self) -> list[tuple[int, int] | None]:
        """Say which gradients there are, and whether they are written to."""
        grads = [parameter.grad for parameter in self.parameters]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def _rescale(self, divisor: Tensor) -> None:
        if self._reducer is not None:
            self._reducer.divide_(divisor)
            return
        resolve_conjugates(self.parameters)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        # In the divisor's own dtype, which is at least float32: a model may mix dtypes.
        torch._foreach_div_(grads, divisor) if grads else None
