"""Examples of jobs, layouts and levels, drawn by hypothesis; the same ones every time."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tests.property import losses, models

import kway
from kway.data.order import Indices, split

__kway_by_value__ = True

MOST_SHARDS = 8


@dataclass(frozen=True)
class Draw:
    """One example: ``job`` on ``ranks`` at ``level``, two steps on batches of these data set indices."""

    words: str
    job: kway.Job
    ranks: int
    level: str
    shards: int
    batches: list[tuple[int, Indices]]

    @property
    def uneven(self) -> bool:
        """Whether shares of the first batch differ in size."""
        return len(set(split(len(self.batches[0][1]), self.ranks))) > 1

    @property
    def empty_share(self) -> bool:
        """Whether a rank has no sample of some batch."""
        return min(len(indices) for _, indices in self.batches) < self.ranks


def decay(model: torch.nn.Module) -> torch.Tensor:
    parts = [(p * p.conj()).real.sum() for p in model.parameters() if p.requires_grad]
    return 0.05 * torch.stack(parts).sum()


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


OPTIMIZERS = (
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    partial(torch.optim.SGD, lr=0.05),
)


@dataclass(frozen=True)
class Loss:
    """A drawn loss: ``head`` is what the model needs behind it; ``inside``: the model itself computes it."""

    words: str
    function: Any
    head: str
    target: torch.Tensor
    inside: bool = False


def _loss(draw: Any, tokens: bool, n: int, anchor: int, g: torch.Generator) -> Loss:
    """Draw a loss for n samples, of which ``anchor`` surely counts."""
    shape = (n, models.WORDS, models.LENGTH) if tokens else (n, models.CLASSES)
    owned = draw(st.integers(0, 3)) == 0
    if owned:
        name = "masked pair" if tokens else draw(st.sampled_from(sorted(losses.OWN)))
        inside = name in ("pair", "masked pair") and draw(st.booleans())
        if tokens:
            target = _ignoring(draw, losses.label(shape, g), anchor, losses.IGNORED, g)
            return Loss(name, losses.masked_pair, "raw", target, inside)
        target = losses.real(shape, g)
        target[anchor, 0] = 1.0
        return Loss(name, losses.OWN[name], "raw", target, inside)
    by_class = sorted(name for name, kind in losses.KINDS.items() if kind.by_class)
    # Losses over classes have most to get wrong: half of the draws are theirs.
    name = draw(st.sampled_from(by_class if tokens or draw(st.booleans()) else sorted(losses.KINDS)))
    kind = losses.KINDS[name]
    options = {key: draw(st.sampled_from(values)) for key, values in kind.options.items()}
    options["reduction"] = draw(st.sampled_from(kind.reductions))
    target = kind.target(shape, g)
    words = [name, options["reduction"]]
    if kind.class_weight and draw(st.booleans()):
        options["weight"] = torch.linspace(0.0 if kind.by_class else 0.3, 2.5, shape[1])
        words.append("weighted")
    if kind.by_class:
        target.view(n, -1)[anchor, 0] = 2
        if draw(st.booleans()):
            ignored = draw(st.sampled_from([losses.IGNORED, 1]))
            options["ignore_index"] = ignored
            target = _ignoring(draw, target, anchor, ignored, g)
            words.append(f"ignoring {ignored}")
    as_function = draw(st.booleans())
    return Loss(" ".join(words), losses.made(kind, options, as_function), kind.head, target)


def _ignoring(draw: Any, target: torch.Tensor, anchor: int, ignored: int, g: torch.Generator) -> torch.Tensor:
    """Mask most labels, of most samples all; one label is left, so that there is a mean."""
    share = draw(st.sampled_from([0.3, 0.9]))
    masked = torch.where(torch.rand(target.shape, generator=g) < share, ignored, target)
    masked.view(len(target), -1)[anchor, 0] = target.view(len(target), -1)[anchor, 0]
    return masked


@st.composite
def examples(draw: Any) -> Draw:
    """Draw one example."""
    ranks = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4]))
    n = draw(st.one_of(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)))
    seed = draw(st.integers(0, 2**31))
    name = draw(st.sampled_from(sorted(models.KINDS)))
    kind = models.KINDS[name]
    n = max(n, kind.least)
    level = draw(st.sampled_from(["math", "math", "math", "bits", "bits", "loose"]))
    shards = draw(st.integers(ranks, MOST_SHARDS)) if level == "bits" else 1
    # A layer's own statistics on each device are not those of one; and a shard needs values to normalise by.
    if kind.norm and (level == "loose" or (level == "bits" and kind.least > 1 and n < kind.least * shards)):
        level, shards = "math", 1
    g = torch.Generator().manual_seed(seed)
    inputs = kind.inputs(n, g)
    anchor = draw(st.integers(0, n - 1))
    loss = _loss(draw, kind.tokens, n, anchor, g)
    later = draw(st.integers(kind.least * (shards if kind.least > 1 else 1), n))
    order = np.random.Generator(np.random.Philox(seed))
    first, others = order.permutation(n), order.permutation(n)
    # Both batches hold the label that surely counts.
    second = order.permutation(np.append(others[others != anchor][: later - 1], anchor))
    micro_batch = None
    if level != "bits" and draw(st.booleans()):
        micro_batch = split(n, ranks)[0] if kind.norm and level == "math" else draw(st.integers(1, n))
    clips: list[Any] = [None, None, 0.3] + ([] if name == "waves" else [("value", 0.05)])
    rule = draw(st.integers(0, len(OPTIMIZERS) - 1))
    job = kway.Job(
        model=partial(models.Headed, kind.make, loss.head, loss.function if loss.inside else None),
        loss=None if loss.inside else loss.function,
        optimizer=OPTIMIZERS[rule],
        data={**inputs, "label": loss.target} if isinstance(inputs, dict) else (inputs, loss.target),
        batch_size=n,
        penalty=draw(st.sampled_from([None, decay])),
        schedule=draw(st.sampled_from([None, halving])),
        clip=draw(st.sampled_from(clips)),
        micro_batch=micro_batch,
        precision=draw(st.sampled_from(["fp64", "fp32"])) if level == "bits" else "fp64",
        seed=seed,
        name=name,
    )
    place = " in the model" if loss.inside else ""
    text = (
        f"{name}, {loss.words}{place}, {n} then {later} samples, {ranks} ranks, {level}, "
        f"shards {shards}, micro_batch {micro_batch}, clip {job.clip}, penalty {job.penalty is not None}, "
        f"schedule {job.schedule is not None}, optimizer {rule}, {job.precision}, seed {seed}"
    )
    return Draw(text, job, ranks, level, shards, [(0, first.astype(np.int64)), (1, second.astype(np.int64))])
