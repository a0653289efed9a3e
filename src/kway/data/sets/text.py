"""English text that comes with Python: what ``help()`` says of the language, as bytes."""

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from kway.data.sources import Source

if TYPE_CHECKING:
    import torch

_LENGTH, _CLASSES = 128, 256
_HELD_OUT = 10  # every tenth topic: topics are not cut, and those of one letter not held out together


def load(data_dir: Path | None, seed: int) -> Source:
    """Read the topics in the order of their names: rows of 128 bytes, every tenth topic held out."""
    from pydoc_data.topics import topics

    from kway.data.texts import Windows

    texts = [topics[name].strip() for name in sorted(topics)]
    held = [number % _HELD_OUT == 0 for number in range(len(texts))]
    train, validation = (
        Windows(
            "text",
            _bytes([text for text, out in zip(texts, held, strict=True) if out is which]),
            _LENGTH,
            _CLASSES,
        )
        for which in (False, True)
    )
    notice = f"the text of Python {platform.python_version()}: that of another version differs"
    return Source("text", train, validation, (_LENGTH,), _CLASSES, [notice])


def _bytes(texts: list[str]) -> "torch.Tensor":
    import torch

    return torch.frombuffer(bytearray("\n\n".join(texts).encode()), dtype=torch.uint8)
