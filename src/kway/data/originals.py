"""Where the files of a data set were published, how long they are and what is in them: plans of downloads."""

from dataclasses import dataclass
from importlib import import_module

from kway.data.sources import module_of, names
from kway.errors import UsageError


@dataclass(frozen=True)
class File:
    """One file to download. ``size`` in bytes; ``sha256`` of the file as it comes; ``urls``: the same file each."""

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class Original:
    """What a set's folder is made from.

    ``files``: kept as they are, or, with ``members``, tar archives: then only the files that ``members`` name are
    taken out, each under its last name. ``home``: a page for whoever gets them by hand.
    """

    files: tuple[File, ...]
    home: str
    members: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(file.size for file in self.files)


def gz_files(base: tuple[str, ...], found: dict[str, tuple[int, str]]) -> tuple[File, ...]:
    """Return the packed files of an IDX set: ``found`` has (size, SHA-256) by name; each lies under all of ``base``."""
    return tuple(
        File(f"{name}.gz", size, sha256, tuple(f"{url}{name}.gz" for url in base))
        for name, (size, sha256) in found.items()
    )


def originals() -> dict[str, Original]:
    """Return what can be downloaded, by name of the data set."""
    found = {name: getattr(import_module(module_of(name)), "ORIGINAL", None) for name in names()}
    return {name: original for name, original in found.items() if original is not None}


def original_of(name: str) -> Original:
    """Return what the set ``name`` is downloaded from. Raises ``UsageError`` for one that is not."""
    found = originals()
    if name in found:
        return found[name]
    if name in names():
        raise UsageError(
            f"data set {name!r} is not downloaded", "it is there without", f"use it: --data {name}"
        )
    raise UsageError(f"data set {name!r}", f"what can be fetched: {', '.join(found)}", "see kway data list")
