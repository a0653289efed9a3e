"""What a rank tells all others with its gradients: which collectives it called, and what it asks for."""

import torch

from kway.comm.group import Group

Tensor = torch.Tensor


class Signs:
    """Writes the fingerprint of a rank's collectives, and its wish, where they travel.

    The fingerprint is that of the collectives between two steps plus that of those within the step, up to where
    it is written.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._between, self._asked = 1, 0

    def begin(self, asked: int) -> None:
        """Begin a step. ``asked``: a small whole number for all other ranks."""
        self._between, self._asked = self._group.trace.take(), asked

    def write(self, fingerprint: Tensor, asked: Tensor) -> int:
        """Write this rank's fingerprint and wish into two scalar tensors that are 0; return the fingerprint."""
        own = self._group.trace.take()
        # Not by assignment, for which torch waits for the device.
        fingerprint.fill_(own + self._between)
        if self._asked:
            asked.fill_(self._asked)
        return own + self._between
