"""A model run over samples without a step: what an engine's evaluation and its outputs are made of."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from kway.data.order import Indices
from kway.data.share import Share
from kway.launch.status import Status
from kway.step.core import StepCore
from kway.step.inputs import move
from kway.step.modes import modes_of, set_modes
from kway.step.seeds import preserved, seed_generators
from kway.step.tally import Tally, mean, measure
from kway.strategies.base import Part


class Evaluation:
    """Runs one rank's part of a model in evaluation mode. All ranks make the same calls in the same order.

    Without gradients where the caller says so.
    """

    def __init__(self, step: StepCore, part: Part, status: Status) -> None:
        self._step, self._part, self._status = step, part, status

    def figures(
        self, shares: Iterable[Share], tally: Tally, rows: Sequence[int], sharded: bool
    ) -> dict[str, float]:
        """Return ``loss`` (where there is one) and every metric over all samples, each counted once. A collective.

        ``rows`` of ``tally``: those of this rank; ``sharded``: whether each micro-batch of a share has its own.
        """
        step, metrics = self._step, self._step.job.metrics
        averaged = step.rule.averaged
        with closing(self._passes(shares, with_loss=True)) as pieces:
            for place, _, count, output, target, total, weight in pieces:
                if count:
                    row = rows[place] if sharded else rows[0]
                    tally.add("loss", total, weight if averaged else torch.ones_like(weight), row)
                    measure(metrics, output, target, count, tally, row)
        sums = tally.result(self._part.batch_group)
        values = {name: mean(pair) for name, pair in sums.items()}
        if not step.rule.averaged:
            values["loss"] = sums["loss"][0]
        return values

    def outputs(self, shares: Iterable[Share]) -> Generator[tuple[Indices, Any], None, None]:
        """Yield (data set indices, output on the CPU) of this rank's part of every batch. To be closed."""
        cpu = torch.device("cpu")
        with closing(self._passes(shares, with_loss=False)) as pieces:
            for _, indices, count, output, *_ in pieces:
                if count:
                    yield indices, move(output, cpu)

    def _passes(self, shares: Iterable[Share], with_loss: bool) -> Generator[tuple[Any, ...], None, None]:
        """Run the model over all micro-batches, on all ranks equally often.

        To be closed by the caller, whatever it raises: else modes and random state would be given back when the
        traceback goes, long after others were set.
        """
        step, device = self._step, self._part.device
        modes = modes_of(step.model)
        step.model.eval()
        step.forget()
        step.follow_loss()
        # What is drawn here is drawn by key, and not from what ranks draw alike between steps.
        drawing = ExitStack()
        drawing.enter_context(preserved(device))
        if step.kept is not None:
            # A job may be judged after its end.
            drawing.enter_context(step.kept.listening())
        try:
            for share in shares:
                self._status.beat()
                self._part.presence.take(share)
                start = 0
                # As in training, buffers move once a batch: how many pieces a rank computes depends on the number of
                # ranks.
                kept = step.kept_over(share)
                if kept is not None:
                    kept.begin(step.modules)
                # Beside those of steps, which count from 0: one a shard at level bits, else one a rank.
                keys = step.seeds(share, -1 - share.step)
                for place, (batch, count) in enumerate(share.micro):
                    if place < len(keys):
                        seed_generators(keys[place], device)
                    indices = share.indices[start : start + count]
                    start += count
                    if with_loss:
                        yield place, indices, count, *step.forward(batch, count)
                    else:
                        yield place, indices, count, step.output(batch)
                    if kept is not None:
                        kept.end_of_piece()
                if kept is not None:
                    kept.end_of_step(self._part.batch_group, idle=False)
        finally:
            set_modes(modes)
            drawing.close()
