"""Models that a property test draws from: small, and each with a trait that breaks careless data parallelism."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__kway_by_value__ = True

CLASSES = 5
WORDS = 7
LENGTH = 3
Tensor = torch.Tensor


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def convolution() -> nn.Module:
    # No bias before a norm: its gradient is zero in mathematics, which leaves only noise to compare.
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Softplus(), nn.Flatten(), nn.Linear(27, CLASSES)
    )


def cumulative() -> nn.Module:
    """Counts batches instead of forgetting old ones, and normalises without a scale of its own."""
    return nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, momentum=None, affine=False), nn.Tanh(),
        nn.Linear(5, CLASSES),
    )  # fmt: skip


def layered() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.GroupNorm(1, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, CLASSES)
    )


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


class Branches(nn.Module):
    """Uses a layer only where a sample asks for it, one never, and holds a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.extra, self.never = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES), nn.Linear(2, 2)
        self.frozen = nn.Linear(CLASSES, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        asks = x[:, 0] > 0.8
        if bool(asks.any()):
            y = y.index_add(0, asks.nonzero().view(-1), self.extra(x[asks]))
        return y + self.frozen(y)


class Waves(nn.Module):
    """Complex weights, behind an odd number of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(CLASSES))
        self.w = nn.Parameter(torch.randn(4, CLASSES, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.w.dtype) @ self.w
        return z.real * 0.3 + z.imag.sin() + self.b


class Recurrent(nn.Module):
    """The last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[1][0][-1])


class Named(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, CLASSES), nn.Linear(3, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.first(left) * self.second(right)


class Words(nn.Module):
    """Tokens (N, LENGTH) to scores (N, WORDS, LENGTH). ``tied``: one table for both ends."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(WORDS, 4, padding_idx=None if tied else 0), nn.Linear(4, WORDS)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(tokens))).transpose(1, 2)


def tied() -> nn.Module:
    return Words(tied=True)


class Headed(nn.Module):
    """A model with what its loss needs behind it. ``loss``: then it returns what the loss does."""

    def __init__(self, make: Callable[[], nn.Module], head: str, loss: Any = None) -> None:
        super().__init__()
        self.net, self.head, self.loss = make(), head, loss

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        args, target = (
            (args[:-1], args[-1]) if self.loss is not None and args else (args, kwargs.pop("label", None))
        )
        y = self.net(*args, **kwargs)
        if self.head == "sigmoid":
            y = torch.sigmoid(y)
        elif self.head == "log_softmax":
            y = F.log_softmax(y, 1)
        return y if self.loss is None else self.loss(y, target)


def _vector(n: int, g: torch.Generator) -> Any:
    return torch.randn(n, 4, generator=g)


def _tokens(n: int, g: torch.Generator) -> Any:
    return torch.randint(WORDS, (n, LENGTH), generator=g)


def _named(n: int, g: torch.Generator) -> Any:
    return {"left": torch.randn(n, 2, generator=g), "right": torch.randn(n, 3, generator=g)}


@dataclass(frozen=True)
class Kind:
    """How to make a model and inputs for n samples. ``least``: values that a batch norm needs in a batch."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    tokens: bool = False
    norm: bool = False
    least: int = 1


KINDS = {
    "linear": Kind(linear, _vector),
    "convolution": Kind(convolution, lambda n, g: torch.randn(n, 1, 5, 5, generator=g), norm=True),
    "cumulative": Kind(cumulative, _vector, norm=True, least=3),
    "layered": Kind(layered, _vector),
    "dropped": Kind(dropped, _vector),
    "branches": Kind(Branches, _vector),
    "waves": Kind(Waves, _vector),
    "recurrent": Kind(Recurrent, lambda n, g: torch.randn(n, LENGTH, 3, generator=g)),
    "named": Kind(Named, _named),
    "words": Kind(Words, _tokens, tokens=True),
    "tied": Kind(tied, _tokens, tokens=True),
}
