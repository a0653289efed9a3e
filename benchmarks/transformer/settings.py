"""What is trained, for both sides alike: sizes, batches, data, how long, and what a step has to compute."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kway.data.texts import Windows
from kway.zoo import get
from kway.zoo.gpt import SIZES

PRODUCT = 8192
RATE = 3e-4


@dataclass(frozen=True)
class Setting:
    """One size of ``gpt``: ``batch`` rows of ``length`` tokens below ``vocabulary`` for each device.

    ``steps``: of an epoch. ``epochs``: those that are timed, after one that is not: 3 s and more on the GPU that
    this was chosen on.
    """

    size: str
    batch: int
    steps: int
    epochs: int
    length: int = 1024
    vocabulary: int = 50_257

    @property
    def name(self) -> str:
        """The model's name in kway."""
        return f"gpt-{self.size}"

    def model(self) -> Callable[[], torch.nn.Module]:
        """Return what makes the model."""
        return partial(get(self.name), (self.length,), self.vocabulary)

    def data(self, k: int) -> Windows:
        """Draw an epoch's rows for k devices: random tokens, the same in every process."""
        rows = self.steps * self.batch * k
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(
            self.vocabulary, (rows * self.length + 1,), generator=generator, dtype=torch.int32
        )
        return Windows("random", tokens, self.length, self.vocabulary)

    def flop(self, parameters: int) -> int:
        """Return the operations of one device's step: 6 n B T of the products, 12 L D T B T of the attention.

        n counts every parameter once, those of the embeddings too. The attention counts whole rows, as if it were not
        causal: as most publications count.
        """
        shape, tokens = SIZES[self.size], self.batch * self.length
        return 6 * parameters * tokens + 12 * shape.layers * shape.width * self.length * tokens


SETTINGS = {
    "124m": Setting("124m", 16, 20, 6),
    "355m": Setting("355m", 16, 12, 4),
    "774m": Setting("774m", 8, 12, 4),
    # Everything runs with this one, in seconds on a CPU.
    "smoke": Setting("1m", 2, 5, 2, length=16, vocabulary=64),
}


def optimizer(parameters: Any, fused: bool) -> torch.optim.Optimizer:
    """Make AdamW as both sides use it."""
    return torch.optim.AdamW(parameters, RATE, fused=fused)
