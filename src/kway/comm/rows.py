"""Sparse gradients as rows of a table, and as whole tables."""

import torch

Tensor = torch.Tensor


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of reals: not every collective keeps an imaginary part."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def has_rows(grad: Tensor) -> bool:
    """Whether a gradient is sparse along dimension 0 alone, as that of a table that was looked up in."""
    return grad.is_sparse and grad.sparse_dim() == 1


def from_rows(rows: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Return a coalesced sparse tensor of the shape of ``like``: ``values`` at the sorted ``rows`` of dimension 0."""
    where = rows.unsqueeze(0)
    return torch.sparse_coo_tensor(where, values, like.shape, is_coalesced=True, check_invariants=False)


def write(grad: Tensor, whole: Tensor) -> None:
    """Overwrite a dense tensor with a gradient. What comes several times adds up, in one order where asked for."""
    if grad.is_sparse:
        # As torch's optimizers read them. What is not coalesced lets torch choose an order that is repeatable.
        indices, values = tuple(grad._indices()), grad._values()
        whole.zero_().index_put_(indices, values.to(whole.dtype), accumulate=True)
    else:
        whole.copy_(grad)
