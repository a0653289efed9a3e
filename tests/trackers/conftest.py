"""What tests of trackers share."""

import importlib
import sys

import pytest
from tests.trackers import stand_ins


@pytest.fixture
def services(tmp_path, monkeypatch):
    """Stand-ins for wandb and mlflow that can be imported; gives the folder that they lie in."""
    folder = tmp_path / "packages"
    folder.mkdir()
    stand_ins.write(folder)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield folder
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)
