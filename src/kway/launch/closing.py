"""What holds processes, and is left as it is closed: at once after an error, else when they are through."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager of something with a ``close``."""

    @abstractmethod
    def close(self, *, kill: bool = False) -> None:
        """End what is held. ``kill``: at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=kind is not None)
