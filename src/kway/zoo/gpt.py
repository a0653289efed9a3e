"""A decoder-only transformer over tokens: normalised before each part, with learned positions and a tied embedding.

The architecture of GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners").
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from kway.errors import UsageError
from kway.zoo import Shape, check

Tensor = torch.Tensor
DATA = "text"
_STD = 0.02


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder. ``length``: positions; ``vocabulary``: different tokens; ``heads`` divide ``width``."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 256
    length: int = 128


# The first two are of bytes. The others are GPT-2's, with its 50,257 tokens rounded up to a multiple of 128.
_GPT2 = 50304, 1024
SIZES = {
    "1m": Config(5, 4, 128),
    "10m": Config(6, 6, 384),
    "124m": Config(12, 12, 768, *_GPT2),
    "355m": Config(24, 16, 1024, *_GPT2),
    "774m": Config(36, 20, 1280, *_GPT2),
}
DEFAULT = "1m"


class Attention(nn.Module):
    """Causal self-attention of several heads, shape (N, T, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.take_in, self.give_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position look at itself and those before."""
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.take_in(x).chunk(3, dim=2)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.give_out(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a perceptron four times as wide, each added to what it was given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.widen = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, T, width) to the same."""
        x = x + self.attention(self.norm1(x))
        wide = F.gelu(self.widen(self.norm2(x)), approximate="tanh")
        return x + self.narrow(wide)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Takes tokens, int64 of shape (N, T), and returns a score for each that may follow, shape (N, vocabulary, T)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Score what follows each position. Classes come second, as torch's losses want them."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        # One matrix for what goes in and what comes out.
        return F.linear(self.norm(x), self.tokens.weight).transpose(1, 2)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0, _STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # What is added up along the way keeps its size, however many layers there are.
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.attention.give_out, block.narrow):
                nn.init.normal_(last.weight, 0, _STD / (2 * self.config.layers) ** 0.5)


def build(shape: Shape, classes: int, size: str = DEFAULT) -> nn.Module:
    """Make a decoder for rows of ``shape`` (T,) tokens below ``classes``: a size of GPT-2 has its own limits of both.

    Raises ``UsageError`` for longer rows, or more tokens, than a size of GPT-2 takes.
    """
    check(f"gpt-{size}", shape, classes, dimensions=1)
    config = SIZES[size]
    if config.length == _GPT2[1]:
        for got, most, what in (
            (shape[0], config.length, "positions"),
            (classes, config.vocabulary, "tokens"),
        ):
            if got > most:
                raise UsageError(f"gpt-{size} for {got} {what}", f"at most {most}")
        return GPT(config)
    return GPT(replace(config, vocabulary=classes, length=shape[0]))
