"""All numbers of a tensor as one vector, of which other views can be taken."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def flat(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the numbers of a dense tensor in order, without gaps and as they count: a view of it where there is one.

    Unlike what ``contiguous().reshape(-1)`` gives, its bytes can be looked at whatever the tensor is: a single number
    is contiguous with any stride, and conjugates and negatives may not be computed yet.
    """
    vector = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if vector.stride(0) == 1:
        return vector
    copy = vector.clone()
    # A single number keeps its stride.
    return copy.as_strided(copy.shape, (1,))
