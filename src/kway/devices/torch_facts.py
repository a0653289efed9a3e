"""What this torch build is, without importing torch: importing it takes longer than all the rest.

Version and CUDA version stand in torch's ``version.py``. What only the running library knows (NCCL, back
ends, GPU architectures) is remembered in a cache, by version, whenever torch is imported anyway.
"""

import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LINE = re.compile(r"^(\w+)\s*(?::[^=]*)?=\s*(?:None|(['\"])(.*)\2)\s*$", re.MULTILINE)


def installed() -> dict[str, Any]:
    """Return ``version``, ``cuda`` and ``hip`` of the installed torch; all ``None`` where there is none."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        try:
            return parse((Path(folder) / "version.py").read_text())
        except OSError:
            continue
    return parse("")


def parse(source: str) -> dict[str, Any]:
    """Read ``version``, ``cuda``, ``hip`` and ``git`` from the text of a ``version.py``."""
    found = {match[1]: match[3] for match in LINE.finditer(source)}
    names = {"version": "__version__", "cuda": "cuda", "hip": "hip", "git": "git_version"}
    return {key: found.get(name) for key, name in names.items()}


def cache_file(version: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return where the facts about this torch version are remembered."""
    return cache_folder(environ) / f"torch-{version}.json"


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what can be found or made again, which need not exist."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    # The standard for these folders says that a relative path is to be ignored.
    folder = Path(base) if base.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".cache"
    return folder / "kway"


def read(build: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the remembered facts about ``build`` (see ``installed``), or ``{}`` where there are none.

    Keys: ``nccl`` (version or ``None``), ``backends`` (``gloo``, ``nccl``, ``mpi``: whether torch has it),
    ``architectures`` (list of ``sm_90`` and the like).
    """
    if not build.get("version"):
        return {}
    try:
        held = json.loads(cache_file(build["version"], environ).read_text())
        if held["git"] != build.get("git"):
            return {}
        return {
            "nccl": held["nccl"],
            "backends": {name: bool(held["backends"][name]) for name in ("gloo", "nccl", "mpi")},
            "architectures": [str(name) for name in held["architectures"]],
        }
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return {}


def remember(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Import torch, remember what only it knows, and return that; skip a cache that cannot be written."""
    import torch
    import torch.distributed as dist

    from kway.records import write_atomically

    has = dist.is_available()
    backends = {
        "gloo": has and dist.is_gloo_available(),
        "nccl": has and dist.is_nccl_available(),
        "mpi": has and dist.is_mpi_available(),
    }
    nccl = None
    if backends["nccl"]:
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    facts = {"nccl": nccl, "backends": backends, "architectures": list(torch.cuda.get_arch_list())}
    try:
        build = installed()
        file = cache_file(str(build["version"]), environ)
        if build["version"] and read(build, environ) != facts:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, (json.dumps({"git": build["git"], **facts}, indent=2) + "\n").encode())
    except (OSError, RuntimeError):
        pass
    return facts
