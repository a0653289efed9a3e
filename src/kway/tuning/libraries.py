"""Which modules are libraries, whose code a version stands for, and which the user may change between two runs."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

# Their versions are part of what a choice depends on anyway.
_KNOWN = ("torch", "kway", "builtins")
_INSTALLED = {"site-packages", "dist-packages"}


def is_library(module: Any) -> bool:
    """Whether a module of this name is torch's, kway's, Python's own or of an installed package.

    What is installed so that it stays where it is written counts as the user's.
    """
    if not isinstance(module, str):
        return False
    top = module.partition(".")[0]
    if top in _KNOWN:
        return True
    file = _held(module, "__file__")
    if not isinstance(file, str):
        return module in sys.builtin_module_names or (
            top in sys.stdlib_module_names and module in sys.modules
        )
    return _is_installed(file)


def name_of(kind: Any) -> str:
    """Return what a function or class is called: of a library with the module, and the version where it has one."""
    module = getattr(kind, "__module__", None)
    name = str(getattr(kind, "__qualname__", type(kind).__name__))
    if not isinstance(module, str) or not is_library(module):
        # Not the module: a script that runs is another one to who imports it.
        return name
    top = module.partition(".")[0]
    version = "" if top in _KNOWN else _held(top, "__version__")
    return f"{module}.{name}" + (f" {version}" if isinstance(version, str) and version else "")


def _held(module: str, name: str) -> Any:
    """Return what a module holds, without asking for what it would first make."""
    return getattr(sys.modules.get(module), "__dict__", {}).get(name)


@cache
def _is_installed(file: str) -> bool:
    path = Path(file)
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return bool(_INSTALLED & set(path.parts)) or any(path.is_relative_to(each) for each in own if each)
