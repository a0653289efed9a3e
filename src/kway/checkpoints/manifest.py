"""The manifest of a checkpoint: what it holds, and by which every file of it is checked.

It is written last. Its bytes are determined by what it says, the hash of itself included, so that a single changed
byte is noticed.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kway.checkpoints.durable import Sum
from kway.errors import UsageError

MANIFEST = "manifest.json"
WEIGHTS = "weights"
FORMAT = 1
_KIND = "kway checkpoint"
_PART = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Manifest:
    """``step`` and ``epoch`` (from 0, of the next step), ``parts``: the JSON half of each part's state, by name;
    ``ties``: names of the weights file that are another one's tensor; ``files``: size and hash by file name.
    """

    step: int
    epoch: int
    parts: dict[str, Any]
    ties: dict[str, str]
    files: dict[str, Sum]

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        files = {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()}
        body = {
            "kind": _KIND,
            "format": FORMAT,
            "step": self.step,
            "epoch": self.epoch,
            "files": files,
            "ties": self.ties,
            "parts": self.parts,
        }
        return _signed(body)

    @classmethod
    def from_bytes(cls, content: bytes, source: Path) -> "Manifest":
        """Read manifest.json. Raises ``UsageError`` with the reason where it is damaged or of a newer format."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            raise UsageError(f"{source} is not JSON") from None
        if not isinstance(body, dict) or body.get("kind") != _KIND:
            raise UsageError(f"{source} is not the manifest of a checkpoint")
        if body.get("format") != FORMAT:
            raise UsageError(
                f"{source} has format {body.get('format')!r}", f"this version of kway reads {FORMAT}"
            )
        body.pop("sha256", None)
        try:
            if _signed(body) != content:
                raise UsageError(f"{source} was changed after it was written", "its hash does not fit it")
            files = {
                name: Sum(int(file["size"]), str(file["sha256"])) for name, file in body["files"].items()
            }
            ties = {name: str(first) for name, first in body["ties"].items()}
            found = cls(_count(body, "step"), _count(body, "epoch"), dict(body["parts"]), ties, files)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"{source} lacks what a manifest needs ({error})") from None
        if not all(name.endswith(".safetensors") and _PART.fullmatch(name[:-12]) for name in files):
            raise UsageError(f"{source} names files outside its folder: {', '.join(files)}")
        if file_of(WEIGHTS) not in files:
            raise UsageError(f"{source} names no {file_of(WEIGHTS)}", "every checkpoint has weights")
        return found


def file_of(part: str) -> str:
    """Return the name of the file with the tensors of a part, or of the weights."""
    return f"{part}.safetensors"


def check_part(name: object) -> None:
    """Raise ``UsageError`` where ``name`` cannot name a part of a checkpoint."""
    if not isinstance(name, str) or not _PART.fullmatch(name) or name == WEIGHTS:
        raise UsageError(
            f"a part {name!r} of a checkpoint",
            f"names are lower-case letters, digits, - and _, at most 64, and not {WEIGHTS!r}",
        )


def _count(body: dict[str, Any], name: str) -> int:
    number = body[name]
    if type(number) is not int or number < 0:
        raise ValueError(f"{name} {number!r}, which counts from 0")
    return number


def _signed(body: dict[str, Any]) -> bytes:
    def text(value: dict[str, Any]) -> bytes:
        return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"

    return text({**body, "sha256": hashlib.sha256(text(body)).hexdigest()})
