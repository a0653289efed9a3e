"""Objects that the user names on the command line: ``package.module:name`` or ``path/file.py:name``."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from kway.errors import UsageError, one_line, text_of
from kway.job import Job
from kway.launch.interrupt import EndedBySignal
from kway.launch.own_frames import from_users_code
from kway.paths import check_reachable
from kway.registry import closest

OWN = "path/file.py:name or package.module:name"


def is_reference(text: str) -> bool:
    """Whether ``text`` names an object in a module or file, rather than something kway knows by name.

    A file without a name counts: ``load_object`` says what is in it.
    """
    return ":" in text or text.endswith(".py")


def load_object(what: str, text: str) -> Any:
    """Return the object that ``text`` names. ``what`` says what it is for, in errors.

    Raises ``UsageError``, with the user's frames below what it says, for a file that fails to import, and one that
    lists the public names where the name is not there.
    """
    place, _, name = (text + ":" * (":" not in text)).rpartition(":")
    # An empty part of a package's name would be a relative import, and there is nothing that it is relative to.
    if not place.endswith(".py") and not (name and all(place.split("."))):
        raise UsageError(f"{what} {text!r}", OWN)
    module = _from_file(what, Path(place)) if place.endswith(".py") else _from_package(what, place)
    names = _names(what, module)
    has = f"it has {', '.join(names) or 'nothing'}"
    if not name:
        raise UsageError(
            f"{what} {text!r} is a file", has, f"say which: {place}:{names[0] if names else 'name'}"
        )
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = closest(name, names)
            advice = f"did you mean {place}:{near}?" if near is not None else ""
            raise UsageError(f"{what} {text!r}: no {name!r} in {place}", has, advice)
        found = getattr(found, part)
    return found


def _names(what: str, module: ModuleType) -> list[str]:
    """List the public names of what a module defines: for a model its jobs, then its classes of modules, if any."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = {n: v for n, v in public.items() if getattr(v, "__module__", None) == module.__name__}
    jobs = [name for name, value in public.items() if isinstance(value, Job)]
    models = [name for name, value in own.items() if hasattr(value, "named_parameters")]
    if what == "model" and (jobs or models):
        return [*sorted(jobs), *sorted(models)]
    callables = [name for name, value in public.items() if callable(value)]
    return sorted(name for name in callables if name in own) or sorted(callables)


def _from_file(what: str, path: Path) -> ModuleType:
    check_reachable(f"{what} file", path)
    if not path.is_file():
        raise UsageError(f"{what} file {path} does not exist", "", f"you are in {Path.cwd()}")
    whole = path.resolve()
    # Two files of one name must not share a module; the same file, named twice, must.
    name = f"kway_file_{path.stem}_{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, whole)
    if spec is None or spec.loader is None:
        raise UsageError(f"{what} file {path} cannot be imported", "a Python file is needed")
    module = importlib.util.module_from_spec(spec)
    # Ranks cannot import it by this name: what it defines travels by value.
    vars(module)["__kway_by_value__"] = True
    sys.modules[name] = module
    sys.path.insert(0, str(whole.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt | EndedBySignal):
            raise
        raise _failed(what, str(path), error) from error
    return module


def _from_package(what: str, place: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise UsageError(
                f"{what}: no module {error.name!r}", "", "check the name, or give path/file.py"
            ) from None
        raise _failed(what, place, error) from error
    except (KeyboardInterrupt, EndedBySignal):
        raise
    except BaseException as error:
        # A module that exits would end the command with its own code, in silence.
        raise _failed(what, place, error) from error


def _failed(what: str, place: str, error: BaseException) -> UsageError:
    said = f"{type(error).__name__}: {one_line(text_of(error))}"
    whole = error.__traceback__
    own = from_users_code(error).__traceback__
    # Bad syntax has no frame of the user's: nothing of the file ran.
    lines = "".join(traceback.format_exception(type(error), error, None if own is whole else own))
    return UsageError(f"{what}: importing {place} raised {said}\n{lines.rstrip()}")
