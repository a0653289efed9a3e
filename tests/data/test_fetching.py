import fcntl
import gzip
import hashlib
import io
import multiprocessing
import os
import tarfile
import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.data.served import Site, serving
from tests.data.small_cifar import binary
from tests.data.test_idx import NAMES, idx

from kway.data import originals
from kway.data.download import Patience
from kway.data.fetching import _alone, fetch
from kway.data.originals import File
from kway.data.sources import load, names
from kway.errors import KwayError, UsageError

QUICK = Patience(silence_s=5, tries=2, pause_s=0.0)


def quiet(event):
    pass


def small_mnist():
    draw = np.random.default_rng(0)
    arrays = [
        draw.integers(0, 256, (12, 5, 6)),
        np.arange(12) % 10,
        draw.integers(0, 256, (4, 5, 6)),
        np.arange(4),
    ]
    return {f"{name}.gz": gzip.compress(idx(array)) for name, array in zip(NAMES, arrays, strict=True)}


def small_archive(tmp_path):
    folder = binary(tmp_path / "made")
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, f"cifar-10-batches-bin/{path.name}")
        stray = tarfile.TarInfo("../stray")
        stray.size = 5
        tar.addfile(stray, io.BytesIO(b"stray"))
    return {"cifar-10-binary.tar.gz": whole.getvalue()}


@pytest.fixture
def site():
    with serving(Site({})) as found:
        yield found


def offer(monkeypatch, site, name, files):
    """Let the set's own plan name the files of ``site``: in all else, it stays as it is."""
    site.files.update(files)
    before = originals.original_of(name)
    made = tuple(
        File(
            file.name,
            len(files[file.name]),
            hashlib.sha256(files[file.name]).hexdigest(),
            (site.url + file.name,),
        )
        for file in before.files
    )
    module = __import__(originals.module_of(name), fromlist=["ORIGINAL"])
    monkeypatch.setattr(module, "ORIGINAL", replace(before, files=made))


def test_four_files_make_a_set(site, monkeypatch, tmp_path):
    offer(monkeypatch, site, "mnist", small_mnist())
    assert fetch("mnist", tmp_path / "root", quiet, QUICK)
    source = load("mnist", tmp_path / "root")
    assert (len(source.train), len(source.validation)) == (12, 4)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["mnist"]
    assert not fetch("mnist", tmp_path / "root", quiet, QUICK)
    assert len(site.asked) == 4


def test_an_archive_is_unpacked_to_the_files_that_are_named(site, monkeypatch, tmp_path):
    offer(monkeypatch, site, "cifar10", small_archive(tmp_path))
    fetch("cifar10", tmp_path / "root", quiet, QUICK)
    assert len(load("cifar10", tmp_path / "root").train) == 50
    assert len([*(tmp_path / "root/cifar10").iterdir()]) == 6
    assert not [*tmp_path.rglob("stray")]


def test_a_call_that_was_cut_off_goes_on_and_shows_nothing_before_all_is_there(site, monkeypatch, tmp_path):
    offer(monkeypatch, site, "mnist", small_mnist())
    site.breaks, site.codes = [10**6, 10, 10**6, 10**6], [200, 200, 404]
    with pytest.raises(
        KwayError, match=r"train-labels.*404.*same command goes on.*put what http.*into .*root/mnist"
    ):
        fetch("mnist", tmp_path / "root", quiet, QUICK)
    assert not (tmp_path / "root/mnist").exists()
    assert fetch("mnist", tmp_path / "root", quiet, QUICK)
    assert [name for name, *_ in site.asked].count(f"{NAMES[0]}.gz") == 1
    assert site.asked[3][1] == "bytes=10-"
    assert len(load("mnist", tmp_path / "root").train) == 12


def test_what_cannot_be_unpacked_leaves_no_half_of_it(site, monkeypatch, tmp_path):
    offer(monkeypatch, site, "cifar10", small_archive(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kway.data.fetching.shutil.copyfileobj", full)
        with pytest.raises(KwayError, match=r"cifar10 cannot be written: No space left.*make room"):
            fetch("cifar10", tmp_path / "root", quiet, QUICK)
    assert not (tmp_path / "root/cifar10").exists()
    assert fetch("cifar10", tmp_path / "root", quiet, QUICK)
    # What was downloaded was still there.
    assert len(site.asked) == 1


def test_two_at_once_download_once(site, monkeypatch, tmp_path):
    offer(monkeypatch, site, "mnist", small_mnist())
    site.pause_s = 0.03
    said: list[list[str]] = [[], []]

    def one(events, results):
        results.append(fetch("mnist", tmp_path / "root", lambda e: events.append(e.get("text")), QUICK))

    results: list[bool] = []
    both = [threading.Thread(target=one, args=(events, results)) for events in said]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(results) == [False, True]
    assert len(site.asked) == 4
    assert any("another process fetches mnist" in str(text) for events in said for text in events)


def test_who_waited_for_one_that_brought_nothing_does_it_itself(site, monkeypatch, tmp_path):
    offer(monkeypatch, site, "mnist", small_mnist())
    folder = tmp_path / "root/.mnist.fetch"
    folder.mkdir(parents=True)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    waits, results = threading.Event(), []

    def told(event):
        if "another process" in str(event.get("text")):
            waits.set()

    thread = threading.Thread(target=lambda: results.append(fetch("mnist", tmp_path / "root", told, QUICK)))
    thread.start()
    assert waits.wait(10)
    folder.rmdir()  # as one that fails does
    os.close(handle)
    thread.join()
    assert results == [True]


@pytest.mark.starts
def test_a_process_that_was_killed_holds_nothing(site, monkeypatch, tmp_path):
    offer(monkeypatch, site, "mnist", small_mnist())
    site.pause_s = 1.0
    child = multiprocessing.get_context("fork").Process(
        target=fetch, args=("mnist", tmp_path / "root", quiet)
    )
    child.start()
    while not [*tmp_path.glob("root/.mnist.fetch/*.part")]:
        assert child.is_alive()
    child.kill()
    child.join()
    site.pause_s = 0.0
    assert fetch("mnist", tmp_path / "root", quiet, QUICK)
    assert len(load("mnist", tmp_path / "root").train) == 12


def test_what_is_missing_while_it_is_held_is_an_error_of_its_own(tmp_path):
    def held():
        with _alone(tmp_path, "mnist", quiet):
            raise FileNotFoundError("of the caller")

    with pytest.raises(FileNotFoundError, match="of the caller"):
        held()
    assert [*tmp_path.iterdir()] == []


def test_a_root_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "root").write_text("a file")
    with pytest.raises(UsageError, match=r"root cannot be written.*--data-dir"):
        fetch("mnist", tmp_path / "root", quiet, QUICK)


def test_what_is_not_downloaded_is_told():
    with pytest.raises(UsageError, match=r"'synthetic' is not downloaded.*--data synthetic"):
        originals.original_of("synthetic")
    with pytest.raises(UsageError, match=r"'imagenet': what can be fetched: cifar10, fashion-mnist, mnist"):
        originals.original_of("imagenet")


def test_plans_are_whole():
    found = originals.originals()
    assert set(found) <= set(names())
    for original in found.values():
        for file in original.files:
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.size > 1000
            assert all(url.startswith("http") and url.endswith(f"/{file.name}") for url in file.urls)
