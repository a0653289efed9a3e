"""Whether ranks called the same collectives, from the fingerprints that they told each other."""

import torch

from kway.errors import MispairedError


def check_calls(calls: torch.Tensor, own: int | None = None) -> None:
    """Raise ``MispairedError`` where ranks' fingerprints of their collectives differ. Waits for the device."""
    found = calls.tolist()
    own = found[0] if own is None else own
    others = [rank for rank, value in enumerate(found) if value != own]
    if others:
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        few = len(others) <= len(found) // 2
        raise MispairedError(
            f"{ranks} took other batches, or called other collectives, than the rest"
            if few
            else "the batches or collectives of ranks do not fit together",
            "all ranks must take steps over the same batches, with the same parameters, layers and collectives, in the "
            "same order",
            "look for a branch on the rank, or on data, around a batch, a layer or a collective",
        )
