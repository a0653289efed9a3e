"""What was found out before on this machine, in the cache folder, under the facts that it depends on."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kway.devices.torch_facts import cache_folder
from kway.records import write_atomically


def digest(facts: Any) -> str:
    """Return a short name for plain facts: another one for others."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def read(place: Path, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what ``write`` has kept at ``place``, a path within the cache folder, under the same facts; else ``None``.

    What lies there under other facts is of another file of the same name, and counts for nothing.
    """
    try:
        held = dict(json.loads((cache_folder() / place).read_text()))
        return held if held["facts"] == json.loads(json.dumps(facts)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(place: Path, facts: Mapping[str, Any], **found: Any) -> None:
    """Keep plain values. A folder that cannot be written costs the next one its time, and nothing else."""
    with suppress(OSError):
        file = cache_folder() / place
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps({**found, "facts": facts}, indent=2) + "\n").encode())
