"""Embeddings that divide a row's gradient by how often the batch looks it up: parts of a batch count for themselves."""

from torch import nn

from kway.errors import RefusedError


def refuse_frequencies(model: nn.Module, cut: str | None, level: str) -> None:
    """Raise ``RefusedError`` for ``scale_grad_by_freq`` where a batch is cut.

    ``cut``: how (over 2 devices), or ``None`` where it is computed as a whole; ``level``: the level that could not be
    kept.
    """
    if cut is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            raise RefusedError(
                f"embedding {name!r} with scale_grad_by_freq, and the batch is cut {cut}",
                f"at exactness {level} a row's gradient is divided by how often the global batch looks it up, and a "
                "part only knows its own",
                "leave scale_grad_by_freq out, or use one device that computes a batch as a whole, or exactness loose, "
                "which counts by device",
            )
