"""What torch.compile needs on this machine, found without torch, and where what it makes is kept."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from kway.devices.torch_facts import cache_folder

# torch and Triton both read it themselves, and put their files below it.
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def missing(device: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return what torch.compile lacks here to compile for ``device`` (``"cpu"`` or ``"cuda"``), or ``None``."""
    environ = os.environ if environ is None else environ
    if device == "cuda":
        if find_spec("triton") is None:
            return "the package triton is not installed"
        # Triton compiles a small program in C that starts a kernel.
        lack = _compiler("C", "CC", ("gcc", "clang"), environ)
    else:
        usual = "clang++" if sys.platform == "darwin" else "g++"
        lack = _compiler("C++", "CXX", (usual,), environ)
    if lack is not None:
        return lack
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else f"{header} is not there (the headers of Python)"


def _compiler(language: str, variable: str, usual: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    given = environ.get(variable)
    names = (given.split()[0],) if given and given.split() else usual
    if any(shutil.which(name, path=environ.get("PATH")) for name in names):
        return None
    named = f" ({variable}={given})" if given else ""
    return f"no {language} compiler {' or '.join(names)} is there{named}"


def keep_code(environ: MutableMapping[str, str] | None = None, usual: str | None = None) -> str | None:
    """Let compiled code be kept from run to run; return the folder, or ``None`` where there can be none.

    The user's TORCHINDUCTOR_CACHE_DIR stays. ``usual``: torch's own choice, a folder of temporary files, which it may
    have set already.
    """
    environ = os.environ if environ is None else environ
    if environ.get(CACHE) in (None, "", usual):
        folder = cache_folder(environ) / "compiled"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                environ[CACHE] = str(folder)
    return environ.get(CACHE)
