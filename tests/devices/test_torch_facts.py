import json
import stat

import pytest
import torch

from kway.devices import torch_facts

GPU_BUILD = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda']
__version__ = '9.1.0+cu140'
debug = False
cuda: Optional[str] = '14.0'
git_version = 'abc'
hip: Optional[str] = None
"""


def test_what_is_installed():
    found = torch_facts.installed()
    assert found["version"] == torch.__version__
    assert found["cuda"] == torch.version.cuda
    assert found["git"] == torch.version.git_version


def test_parse():
    expected = {"version": "9.1.0+cu140", "cuda": "14.0", "hip": None, "git": "abc"}
    assert torch_facts.parse(GPU_BUILD) == expected
    assert torch_facts.parse('__version__ = "2.0"\ncuda = None\n')["version"] == "2.0"
    assert set(torch_facts.parse("").values()) == {None}


def test_no_torch(monkeypatch):
    monkeypatch.setattr(torch_facts, "find_spec", lambda name: None)
    assert torch_facts.installed()["version"] is None


def test_remember_and_read(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    build = torch_facts.installed()
    assert torch_facts.read(build, environ) == {}
    facts = torch_facts.remember(environ)
    assert facts["backends"]["gloo"] == torch.distributed.is_gloo_available()
    assert facts["architectures"] == torch.cuda.get_arch_list()
    assert torch_facts.read(build, environ) == facts
    assert torch_facts.read({**build, "git": "another build"}, environ) == {}
    assert torch_facts.read({**build, "version": "1.0"}, environ) == {}


def test_cache_folder():
    assert str(torch_facts.cache_file("2", {"XDG_CACHE_HOME": "/c", "HOME": "/h"})) == "/c/kway/torch-2.json"
    for odd in ("", "relative"):
        file = torch_facts.cache_file("2", {"XDG_CACHE_HOME": odd, "HOME": "/h"})
        assert str(file) == "/h/.cache/kway/torch-2.json"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"git": null}', '{"git": "g", "nccl": 1, "backends": [2]}'])
def test_a_damaged_cache_is_no_cache(tmp_path, text):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    file = torch_facts.cache_file("2", environ)
    file.parent.mkdir()
    file.write_text(text)
    assert torch_facts.read({"version": "2", "git": "g"}, environ) == {}


def test_a_damaged_cache_is_mended(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    file = torch_facts.cache_file(torch.__version__, environ)
    file.parent.mkdir()
    file.write_text("{")
    facts = torch_facts.remember(environ)
    assert json.loads(file.read_text())["backends"] == facts["backends"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_an_unwritable_cache_is_skipped(tmp_path):
    (tmp_path / "file").write_text("")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    assert "backends" in torch_facts.remember(environ)
    assert torch_facts.read(torch_facts.installed(), environ) == {}
