"""Every error that kway raises on purpose.

``KwayError``
    ``UsageError``: the user's input cannot work; raised before any process starts. Exit code 2.
        ``DataError``: a data set is missing, truncated or malformed.
        ``RefusedError``: the input is valid, but kway will not do it at this exactness level or layout.
        ``NotMeasuredError``: a prediction needs a time that nobody has measured. A ``LookupError`` too.
    ``RankError``: a rank raised or died. Carries the rank, its exit code and its traceback.
        ``StallError``: a rank made no progress for too long. Carries its stack.
        ``ItemError``: a call of ``kway.map`` failed. Carries the place of its item.
    ``NonFiniteError``: the loss became NaN or infinite.
    ``MispairedError``: ranks took other batches, or called other collectives, than each other.
    ``ReplicaError``: the copies of the weights that ranks hold differ, in numbers, shapes or names.
    ``StoppedError``: the run was asked to stop, and left a checkpoint. Exit code 75.
    ``OutOfMemoryError``: a device had no room for what a step asked of it. Carries the memory by part.
"""

from collections.abc import Mapping


def text_of(error: BaseException) -> str:
    """Return the message of any exception, in Python's own words where its ``__str__`` fails."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


# Of what somebody else wrote: kway's last line is one that a terminal and a log can show.
_LONGEST = 500
# How torch hands on what a loader worker raised: its own words first, and what was raised at the very end.
_HANDED_ON = "Original Traceback (most recent call last):"


def line_of(error: BaseException) -> str:
    """Return class and message of any exception in one line of at most 500 characters: the first of its message."""
    kind = type(error)
    module = "" if kind.__module__ in ("__main__", "builtins") else f"{kind.__module__}."
    # What a syntax error says as a text names the file once more.
    text = (str(error.msg) if isinstance(error, SyntaxError) else text_of(error)).lstrip()
    if isinstance(error, RankError):
        text = error.headline
    return one_line(f"{module}{kind.__qualname__}: {text}" if text else f"{module}{kind.__qualname__}")


def one_line(text: str) -> str:
    """Return the first line of ``text`` that is not blank, at most 500 characters; the last, too, of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    first = f"{lines[0].rstrip('.')}: {lines[-1]}" if _HANDED_ON in lines[1:] else lines[0]
    return first if len(first) <= _LONGEST else f"{first[: _LONGEST - 3]}..."


class KwayError(Exception):
    """Base of all errors of kway.

    The message has up to three parts: what was found (``got``), what would be right (``need``) and what
    the user can do about it (``do``).
    """

    exit_code = 1
    # Where a script that ranks ran led to it: that rank's, for whoever prints the message.
    traceback = ""

    def __init__(self, got: str, need: str = "", do: str = "") -> None:
        self.got, self.need, self.do = got, need, do
        super().__init__(got, need, do)

    def __str__(self) -> str:
        text = f"{self.got}: {self.need}" if self.need else self.got
        return f"{text}; {self.do}" if self.do else text


class UsageError(KwayError):
    """The user's input cannot work. Raised before any process starts and before anything is written."""

    exit_code = 2


class DataError(UsageError):
    """A data set is missing, truncated or malformed."""


class RefusedError(UsageError):
    """Valid input that kway refuses, with the reason: a level that a layout cannot keep, for example."""


class NotMeasuredError(UsageError, LookupError):
    """A prediction needs a time that was not measured. The message says which, and what measures it."""


class NonFiniteError(KwayError):
    """The loss became NaN or infinite. The message names epoch, step and rank."""


class MispairedError(KwayError):
    """In one step ranks took other batches or called other collectives than each other: numbers went astray."""


class ReplicaError(KwayError):
    """The copies of the weights that ranks hold differ, in numbers, shapes or names. The message names one."""


class StoppedError(KwayError):
    """The run was asked to stop, did so after a whole step, and can be gone on with. Exit code 75."""

    exit_code = 75


class OutOfMemoryError(KwayError):
    """A device ran out of memory. The message says where, what lay there by part, and what would fit.

    ``rank`` and ``device`` (as torch spells it) ran out in ``phase``: ``start``, ``input``, ``forward``, ``backward``,
    ``reduction``, ``update``, ``step`` (another part of one), ``evaluation`` or ``reference``. ``samples``: the most
    that were computed at once there. ``memory``: bytes by name. ``fits``: how many samples at once fit by what was
    measured, ``None`` where that says nothing.
    """

    def __init__(
        self,
        got: str,
        need: str = "",
        do: str = "",
        *,
        rank: int = 0,
        device: str = "cpu",
        phase: str = "step",
        samples: int = 0,
        memory: Mapping[str, int] | None = None,
        fits: int | None = None,
    ) -> None:
        super().__init__(got, need, do)
        self.rank, self.device, self.phase, self.samples = rank, device, phase, samples
        self.memory, self.fits = dict(memory or {}), fits

    @property
    def is_by_samples(self) -> bool:
        """Whether fewer samples at once need less there. Optimizer, weights and their gradients do not, and the batches
        of a step are brought to the device together.
        """
        return self.phase in ("forward", "backward", "step", "evaluation") and self.samples > 1

    def __str__(self) -> str:
        # Tables and lists read better below each other.
        parts = [self.got, *(part for part in (self.need, self.do) if part)]
        return "\n".join(parts)


class RankError(KwayError):
    """A rank raised an exception, or its process ended early. ``cause`` says so in one line.

    ``rank`` is the rank that failed first in time, ``exit_code`` what the job should exit with (a signal
    ``s`` reads ``128 + s``), ``traceback`` the failing rank's own traceback, or an empty string where the
    process died without one. ``died``: what ended it was not its own code, but a signal, or the loss of its
    device or of its peers.
    """

    def __init__(
        self, rank: int, exit_code: int, cause: str, traceback: str = "", died: bool = False
    ) -> None:
        self.rank, self.exit_code, self.cause, self.traceback = rank, exit_code, cause, traceback
        self.died = died
        super().__init__(f"rank {rank} failed", cause)
        self.args = (rank, exit_code, cause, traceback, died)

    @property
    def headline(self) -> str:
        """The message without the traceback."""
        return f"rank {self.rank} failed: {self.cause}"

    def __str__(self) -> str:
        return f"{self.traceback.rstrip()}\n{self.headline}" if self.traceback else self.headline


class StallError(RankError):
    """A rank made no progress for longer than the stall timeout. ``traceback`` is its stack, where it had one."""

    @property
    def headline(self) -> str:
        """The message without the stack."""
        return f"rank {self.rank} {self.cause}"


class ItemError(RankError):
    """A call of ``kway.map`` raised an exception, or its process ended early. ``item``: the place of its item, from 0.

    ``device``: where it ran; ``rank``: which of the processes it was. The other fields are those of ``RankError``. What
    kway itself raised there is its ``__cause__``.
    """

    def __init__(
        self,
        item: int,
        device: str,
        rank: int,
        exit_code: int,
        cause: str,
        traceback: str = "",
        died: bool = False,
    ) -> None:
        super().__init__(rank, exit_code, cause, traceback, died)
        self.item, self.device = item, device
        self.args = (item, device, rank, exit_code, cause, traceback, died)

    @property
    def headline(self) -> str:
        """The message without the traceback."""
        return f"item {self.item} on {self.device} failed: {self.cause}"
