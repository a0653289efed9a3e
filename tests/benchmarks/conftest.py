import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module_of(monkeypatch):
    """Import a script of a benchmark by folder and name, as it is when it runs: its own folder comes first.

    What it brings in is forgotten again, because scripts of other benchmarks have the same names.
    """
    before = set(sys.modules)

    def load(folder, name):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.syspath_prepend(str(BENCHMARKS / folder))
        return importlib.import_module(name)

    path = list(sys.path)
    yield load
    sys.path[:] = path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(BENCHMARKS):
            del sys.modules[name]
