"""The GPU of an Apple computer, which torch reaches through Metal (MPS): what it is, asked without torch."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# torch calls its MPS device usable from this version of macOS on.
OLDEST = 14
NO_COLLECTIVES = "kway runs no ranks on MPS devices: torch has no collectives between them"
NAME, MEMORY = ("sysctl", "-n", "machdep.cpu.brand_string"), ("sysctl", "-n", "hw.memsize")
# Takes most of a second.
DISPLAYS = ("system_profiler", "SPDisplaysDataType", "-json")
_LIMIT_S = 10


class Host:
    """What this machine says of itself: its system, architecture and version, and what its commands print."""

    system = sys.platform
    machine = platform.machine()

    def version(self) -> str:
        """Return the version of macOS, an empty text elsewhere."""
        return platform.mac_ver()[0]

    def output(self, command: Sequence[str]) -> str:
        """Return what a command prints, an empty text where it cannot be run."""
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_S, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return ""


def read(build: Mapping[str, Any], host: Host | None = None) -> dict[str, Any] | None:
    """Describe the GPU, or return ``None`` on other machines than Apple's.

    ``name`` (of the chip), ``memory_total`` (bytes, which CPU and GPU share), ``usable`` (by torch) and ``why``: what
    kway makes of it, or why torch cannot use it. ``build``: see ``torch_facts.installed``.
    """
    host = Host() if host is None else host
    if host.system != "darwin":
        return None
    problem = _problem(build, host)
    return {
        "name": host.output(NAME).strip() or "unknown",
        "memory_total": _whole(host.output(MEMORY)),
        "usable": not problem,
        "why": problem or NO_COLLECTIVES,
    }


def attributes(host: Host | None = None) -> dict[str, Any]:
    """Return ``model``, ``gpu_cores`` and ``metal`` (the version it supports) of the GPU, as far as they are told."""
    host = Host() if host is None else host
    card = _card(host.output(DISPLAYS)) if host.system == "darwin" else {}
    found = {
        "model": card.get("sppci_model"),
        "gpu_cores": _whole(card.get("sppci_cores")),
        "metal": str(card.get("spdisplays_mtlgpufamilysupport", "")).removeprefix("spdisplays_metal") or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _problem(build: Mapping[str, Any], host: Host) -> str:
    if build["version"] is None:
        return "torch is not installed"
    if host.machine != "arm64":
        return f"torch uses the GPUs of Apple silicon, this machine is {host.machine}"
    major = _whole(host.version().partition(".")[0])
    if major is not None and major < OLDEST:
        return f"macOS {host.version()} is older than {OLDEST}.0, which torch needs for MPS"
    return ""


def _card(text: str) -> dict[str, Any]:
    """Return the first GPU that Apple's own description of displays lists."""
    try:
        cards = json.loads(text)["SPDisplaysDataType"]
        return next((dict(card) for card in cards if "sppci_model" in card), {})
    except (ValueError, KeyError, TypeError):
        return {}


def _whole(value: Any) -> int | None:
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() else None
