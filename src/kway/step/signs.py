"""What a rank tells all others with its gradients: which collectives it called, and what it asks for."""

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from kway.comm.group import Group
from kway.step.telling import Telling

Tensor = torch.Tensor
# What single precision holds exactly.
_MOST = 1 << 24


class Signs:
    """Writes the fingerprint of a rank's collectives, and its wish, where they travel.

    The fingerprint is that of the collectives between two steps plus that of those within the step, up to where
    it is written. ``telling``: which steps tell it. Where not all do, it is one of all collectives so far, so that what
    differed in a step shows in every later one.
    """

    def __init__(self, group: Group, telling: Telling) -> None:
        self._group, self.telling, self._each = group, telling, telling.each
        self._between, self._asked = 1, 0
        self._steps, self._told_after, self._tells = 0, 0, True
        # For recorded steps, which read there what changes: the fingerprint and the wish.
        self.on_device, self.own = False, 0
        self._cells: Tensor | None = None
        self._told = (0, 0)

    def begin(self, asked: int) -> None:
        """Begin a step. ``asked``: a small whole number for all other ranks."""
        self._asked = asked
        if self._each:
            self._between = self._group.trace.take()
        else:
            self._steps += 1
            self._tells = self.telling.due(self._steps)

    def cells(self, device: torch.device) -> tuple[Tensor, int] | None:
        """Return fingerprint and wish as ``device`` holds them, shape (2,), and the fingerprint.

        They are there already where a step is recorded. ``None`` where not every step tells them: to bring them there
        each time would cost what is saved.
        """
        if not self._each:
            return None
        self.own = self._group.trace.take()
        if self.on_device:
            return self._on_device(), self.own + self._between
        if self._cells is None:
            self._cells = torch.zeros(2, dtype=torch.float64, device=device)
        self.tell(self.own)
        return self._cells, self.own + self._between

    def write(self, fingerprint: Tensor, asked: Tensor) -> int | None:
        """Write this rank's fingerprint and wish into two scalar tensors that are 0.

        Return the fingerprint, or ``None`` in a step that does not tell it.
        """
        if not self._each:
            if self._asked:
                asked.fill_(self._asked)
            if not self._tells:
                return None
            so_far = self._so_far()
            fingerprint.fill_(so_far)
            return so_far
        self.own = self._group.trace.take()
        if _get_current_dispatch_mode() is None:
            return self._write(fingerprint, asked)
        # What is written is another way for a recording, and no part of what makes two steps alike.
        with _disable_current_modes():
            return self._write(fingerprint, asked)

    def _write(self, fingerprint: Tensor, asked: Tensor) -> int:
        if self.on_device:
            cells = self._on_device()
            fingerprint.copy_(cells[0])
            asked.copy_(cells[1])
            return self.own + self._between
        if self._cells is None:
            self._cells = torch.zeros(2, dtype=torch.float64, device=fingerprint.device)
        # Not by assignment, for which torch waits for the device.
        fingerprint.fill_(self.own + self._between)
        if self._asked:
            asked.fill_(self._asked)
        return self.own + self._between

    def _on_device(self) -> Tensor:
        if self._cells is None:
            raise RuntimeError("a step was recorded before one was taken")
        return self._cells

    def untold(self, again: bool = False) -> int | None:
        """Return the fingerprint of all steps so far, ``None`` where all of them were told of.

        It counts as told from now on. ``again``: also where the last step told it already.
        """
        if self._each or (self._told_after == self._steps and not again):
            return None
        return self._so_far()

    def _so_far(self) -> int:
        self._told_after = self._steps
        # Never taken, so that it is one of all of them.
        return self._group.trace.left % _MOST

    def tell(self, own: int) -> None:
        """Bring to the device what a recorded step writes. ``own``: the fingerprint of the collectives in it."""
        now = (own + self._between, self._asked)
        if self._cells is None or now == self._told:
            return
        for cell, value, before in zip(self._cells, now, self._told, strict=True):
            if value != before:
                cell.fill_(value)
        self._told = now
