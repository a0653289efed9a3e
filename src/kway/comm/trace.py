"""What a rank said to the others since the last time it was asked: a fingerprint of its collectives in their order.

Back ends pair collectives by the order in which ranks call them, whatever they are: a rank that calls one more, or
another, can be handed numbers of a tensor that it never asked for, without an error.
"""

import zlib

# Fingerprints may travel in single precision, two in one number.
_LIMIT = 1 << 15
_MOST_KNOWN = 10_000


class Trace:
    """Takes note of collectives by name, and of shape and dtype where these must be equal on all ranks."""

    def __init__(self) -> None:
        # Collectives begun, those of ``Untraced`` beside it among them.
        self.begun = 0
        # What was noted since the last time: a step that is done again by a recording leaves it as it was then.
        self.left = 0
        # Collectives of tensors as they were taken note of before: most steps call the same ones. The others may never
        # come again (a batch of its own), and would fill it.
        self._known: dict[tuple[object, ...], bytes] = {}

    def note(self, name: str, shape: tuple[int, ...] = (), dtype: object = None, of: str = "") -> None:
        """Take note of one collective. ``of``: whose numbers it is about, where that is the same on all ranks."""
        self.begun += 1
        call = (name, shape, dtype, of)
        text = self._known.get(call)
        if text is None:
            text = f"{name}{shape}{dtype}{of}".encode()
            if dtype is not None and len(self._known) < _MOST_KNOWN:
                self._known[call] = text
        self.add(text)

    def add(self, text: bytes) -> None:
        """Take note of what is done in every step, and written down once."""
        self.left = zlib.crc32(text, self.left)

    def take(self) -> int:
        """Return the fingerprint, from 1 to 2^15 - 1, and start anew."""
        found, self.left = self.left, 0
        return found % (_LIMIT - 1) + 1


class Untraced(Trace):
    """Takes no note: of collectives that ranks start at different times the order tells nothing.

    Counts them with those of ``beside``.
    """

    def __init__(self, beside: Trace) -> None:
        super().__init__()
        self._beside = beside

    def note(self, name: str, shape: tuple[int, ...] = (), dtype: object = None, of: str = "") -> None:
        """Count it."""
        self._beside.begun += 1

    def add(self, text: bytes) -> None:
        """Take no note."""
