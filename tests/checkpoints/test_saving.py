"""A checkpoint appears whole or not at all, replaces only its own kind, and older ones go only after it is durable."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.checkpoints.snapshots import snapshot

from kway.checkpoints import durable, folder, saving
from kway.checkpoints.durable import DurableFile
from kway.checkpoints.folder import partial, places, settle
from kway.checkpoints.reading import newest, open_checkpoint
from kway.checkpoints.saving import remove_older, write_checkpoint
from kway.checkpoints.snapshot import Snapshot, freeze
from kway.errors import UsageError


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def write(path, step, **parts):
    return write_checkpoint(path, freeze(snapshot(step, **parts), {}))


def test_the_folder_is_made_where_only_it_is_missing(tmp_path):
    assert write(tmp_path / "checkpoints", 7) == tmp_path / "checkpoints/step-7"
    assert names(tmp_path / "checkpoints") == ["step-7"]
    assert names(tmp_path / "checkpoints/step-7") == [
        "manifest.json",
        "optimizer.safetensors",
        "weights.safetensors",
    ]
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "gone/checkpoints", 7)
    assert not (tmp_path / "gone").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which file a descriptor is")
def test_everything_is_flushed_in_order_before_the_name_appears_and_older_ones_go(tmp_path, monkeypatch):
    done: list[str] = []
    target = tmp_path / "checkpoints"
    write(target, 1)
    flush, rename = os.fsync, Path.rename

    def fsync(handle):
        done.append(f"flush {Path(f'/proc/self/fd/{handle}').readlink().name[:8]}")
        flush(handle)

    def renamed(self, to):
        done.append(f"rename {self.name[:7]} {to.name[:7]}")
        return rename(self, to)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    write(target, 2)
    remove_older(target, 2, 1)
    assert done == [
        "flush weights.", "flush optimize", "flush manifest", "flush .step-2-",
        "rename .step-2 step-2", "flush checkpoi", "rename step-1 .step-1",
    ]  # fmt: skip


def test_the_same_step_again_replaces(tmp_path):
    write(tmp_path, 3, note="old")
    write(tmp_path, 3, note="new")
    assert names(tmp_path) == ["step-3"]
    assert newest(tmp_path).part("note") == "new"


def test_a_broken_one_of_the_same_step_is_replaced(tmp_path):
    (write(tmp_path, 3) / "manifest.json").write_text("{")
    write(tmp_path, 3, note="new")
    assert newest(tmp_path).part("note") == "new"


@pytest.mark.parametrize("step", ["folder", "empty", "file", "link", "dangling"])
def test_what_kway_did_not_write_is_never_replaced(step, tmp_path):
    target = tmp_path / "checkpoints"
    write(target, 1)
    path = target / "step-2"
    if step in {"folder", "empty"}:
        path.mkdir()
    if step == "folder":
        (path / "precious").write_text("x")
    if step == "file":
        path.write_text("x")
    if step == "link":
        path.symlink_to(write(tmp_path, 2))
    if step == "dangling":
        path.symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        UsageError, match="step-2 exists: it is no checkpoint that kway may replace; move it away"
    ):
        write(target, 2)
    assert sorted(tmp_path.rglob("*")) == before
    assert newest(target, lambda text: None) is not None


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    write(tmp_path, 3, note="old")
    rename = Path.rename

    def failing(self, to):
        if self.name.endswith(".part"):
            raise OSError(errno.EIO, "broken")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="broken"):
        write(tmp_path, 3, note="new")
    assert names(tmp_path) == ["step-3"]
    assert newest(tmp_path).part("note") == "old"


def test_the_next_writer_finishes_a_replacement_that_was_cut_off(tmp_path):
    write(tmp_path, 3, note="old").rename(tmp_path / "step-3.replaced")
    write(tmp_path, 4)
    assert names(tmp_path) == ["step-3", "step-4"]
    shutil.copytree(tmp_path / "step-3", tmp_path / "step-3.replaced")
    write(tmp_path, 5)
    assert names(tmp_path) == ["step-3", "step-4", "step-5"]
    assert open_checkpoint(tmp_path / "step-3").part("note") == "old"


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "manifest.json"])
def test_an_error_at_any_file_leaves_nothing_and_touches_nothing(file, tmp_path, monkeypatch):
    write(tmp_path, 1)
    write_to = DurableFile.write

    def failing(self, content):
        if Path(self._file.name).name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_to(self, content)

    monkeypatch.setattr(DurableFile, "write", failing)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    assert names(tmp_path) == ["step-1"]
    assert newest(tmp_path).step == 1


def test_a_dead_run_is_cleared_by_the_next_writer_and_a_living_one_is_not(tmp_path):
    dead, empty, alive = (partial(tmp_path, step) for step in (1, 2, 3))
    for path in (dead, empty, alive):
        path.mkdir()
    (dead / "weights.safetensors").write_bytes(b"half")
    living = DurableFile(alive / "weights.safetensors")
    foreign = tmp_path / ".step-4.part"
    foreign.mkdir()
    link = tmp_path / ".step-5-0123456789ab.part"
    link.symlink_to(foreign)
    newest(tmp_path)
    assert all(path.exists() for path in (dead, empty, alive))
    write(tmp_path, 9)
    assert names(tmp_path) == sorted([alive.name, foreign.name, link.name, "step-9"])
    living.close()
    settle(tmp_path)
    assert not alive.exists()


def test_the_lock_of_a_run_goes_with_its_process(tmp_path):
    code = (
        "import sys, os, pathlib\nfrom kway.checkpoints.durable import DurableFile\n"
        "f = DurableFile(pathlib.Path(sys.argv[1]))\nprint('on', flush=True)\nsys.stdin.read()\n"
    )
    path = partial(tmp_path, 1)
    path.mkdir()
    command = [sys.executable, "-c", code, str(path / "weights.safetensors")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        settle(tmp_path)
        assert path.exists()
        child.kill()
    settle(tmp_path)
    assert not path.exists()


def test_without_locks_only_what_is_old_is_cleared(tmp_path, monkeypatch):
    fresh, old = partial(tmp_path, 1), partial(tmp_path, 2)
    for path in (fresh, old):
        path.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    monkeypatch.setattr(folder, "is_locked", lambda path: None)
    settle(tmp_path)
    assert names(tmp_path) == [fresh.name]


def test_keep_counts_whole_ones_before_the_saved_one(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    assert remove_older(tmp_path, 5, 3) == []
    assert names(tmp_path) == ["step-3", "step-4", "step-5"]
    (tmp_path / "step-4/optimizer.safetensors").write_bytes(b"short")
    write(tmp_path, 6)
    remove_older(tmp_path, 6, 2)
    assert names(tmp_path) == ["step-5", "step-6"]
    (tmp_path / "step-5/optimizer.safetensors").write_bytes(b"short")
    write(tmp_path, 2)
    remove_older(tmp_path, 6, 2)
    assert newest(tmp_path).step == 6
    assert names(tmp_path) == ["step-2", "step-5", "step-6"]  # step 5 is broken: step 2 is the other of the 2


def test_keep_never_takes_the_saved_one_later_ones_or_what_is_not_kways(tmp_path):
    for step in (1, 2, 3, 9):
        write(tmp_path, step)
    (tmp_path / "step-1").rename(tmp_path / "elsewhere")
    (tmp_path / "step-1").symlink_to("elsewhere")
    (tmp_path / "step-0").mkdir()
    assert remove_older(tmp_path, 3, 1) == []
    assert names(tmp_path) == ["elsewhere", "step-0", "step-1", "step-3", "step-9"]


def test_one_that_cannot_be_removed_is_a_line(tmp_path, monkeypatch):
    write(tmp_path, 1)
    write(tmp_path, 2)

    def failing(path, step):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(saving, "discard", failing)
    assert remove_older(tmp_path, 2, 1) == [
        f"checkpoint {tmp_path}/step-1 could not be removed (Permission denied)"
    ]


def test_places_are_newest_first(tmp_path):
    for name in ("step-2", "step-10", "step-2.replaced", "step-9", "step-10.old"):
        (tmp_path / name).mkdir()
    assert [place.path.name for place in places(tmp_path)] == [
        "step-10",
        "step-9",
        "step-2",
        "step-2.replaced",
    ]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"step": -1}, "a snapshot with step -1: it counts from 0"),
        ({"epoch": 1.5}, "a snapshot with epoch 1.5"),
        (
            {"weights": {"w": "x"}},
            r"weights\['w'\] is a str: weights are tensors; put other state into a part",
        ),
        ({"weights": {"w": torch.ones(2, device="meta")}}, r"weights\['w'\] is a tensor on the meta device"),
        ({"weights": {"__metadata__": torch.ones(1)}}, "as the name of a tensor"),
        ({"parts": {"optimizer": {"x": [object()]}}}, r"optimizer\['x'\]\[0\] is a builtins.object"),
        ({"parts": {"weights": {}}}, "a part 'weights' of a checkpoint"),
        ({"parts": {"../x": {}}}, r"a part '\.\./x' of a checkpoint"),
    ],
)
def test_a_snapshot_that_cannot_be_stored_says_where(parts, reason):
    good = {"step": 1, "epoch": 0, "weights": {}, "parts": {}}
    with pytest.raises(UsageError, match=reason):
        freeze(Snapshot(**{**good, **parts}), {})
