"""The newest checkpoint that is whole is found; broken ones are left out with the reason, and nothing runs."""

import ast
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints.snapshots import snapshot

import kway.checkpoints
from kway.checkpoints.folder import discard
from kway.checkpoints.reading import newest, open_checkpoint
from kway.checkpoints.saving import remove_older, write_checkpoint
from kway.checkpoints.snapshot import Snapshot, freeze
from kway.errors import UsageError


def found(folder):
    """(step of the newest, or None; the reasons why others were left out)."""
    reasons: list[str] = []
    checkpoint = newest(folder, reasons.append)
    return checkpoint and checkpoint.step, reasons


def listing(folder):
    return sorted(
        (path, path.is_file() and path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*")
    )


def test_a_checkpoint_comes_back(checkpoint, tmp_path):
    checkpoint(12, schedule={"last": (1, float("nan"))}, positions=None)
    read = newest(tmp_path / "checkpoints")
    assert (read.step, read.epoch) == (12, 1)
    assert read.weights()["w"].tolist() == [[12.0] * 3] * 2
    assert read.weights().keys() == {"w", "tied"}
    assert read.part("optimizer")["w"]["exp_avg"].tolist() == [12.0] * 3
    assert read.part("schedule")["last"][0] == 1
    assert read.part("positions") is None
    assert "positions" in read
    assert "ema" not in read


def test_tied_weights_are_one_tensor_again_and_two_names_in_the_file(checkpoint):
    folder = checkpoint(3)
    weights = open_checkpoint(folder).weights()
    assert weights["w"] is weights["tied"]
    assert load_file(folder / "weights.safetensors").keys() == {"w", "tied"}


@pytest.mark.parametrize(
    "ties", [{"tied": "other"}, {"other": "w"}, {"other": "other"}, {"tied": "short"}, {"tied": ["w"]}]
)
def test_ties_that_the_weights_do_not_have_are_refused(ties, tmp_path):
    weights = {"w": torch.ones(2, 3), "tied": torch.ones(2, 3), "short": torch.ones(2)}
    frozen = replace(freeze(Snapshot(3, 0, weights, {}), {}), ties={})
    folder = write_checkpoint(tmp_path / "checkpoints", frozen)
    edited = replace(open_checkpoint(folder).manifest, ties=ties)
    (folder / "manifest.json").write_bytes(edited.to_bytes())
    with pytest.raises(UsageError, match=r"manifest\.json says that .* is the tensor of"):
        open_checkpoint(folder).weights()


def test_the_weights_load_in_a_bare_model_without_kway(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[1].running_mean += 2
    state = kway.checkpoints.snapshot.Snapshot(1, 0, model.state_dict(), {})
    write_checkpoint(tmp_path / "c", freeze(state, {}))
    code = (
        "import sys, torch, safetensors.torch as s\n"
        "m = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))\n"
        "m.load_state_dict(s.load_file(sys.argv[1]))\n"
        "assert 'kway' not in sys.modules\n"
        "print(m[1].running_mean.tolist(), m[0].weight.sum().item())"
    )
    file = tmp_path / "c/step-1/weights.safetensors"
    run = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"[2.0, 2.0, 2.0, 2.0] {model[0].weight.sum().item()}"


def test_the_largest_step_is_the_newest_not_the_last_name_or_time(checkpoint, tmp_path):
    for step in (100, 9, 20):
        checkpoint(step)
    assert found(tmp_path / "checkpoints") == (100, [])


def test_no_folder_and_an_empty_folder_have_none(tmp_path):
    assert newest(tmp_path / "gone") is None
    assert newest(tmp_path) is None


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="x cannot be listed"):
        newest(tmp_path / "x")


def truncate(folder):
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = folder / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def lose(folder):
    (folder / "optimizer.safetensors").unlink()


def garbage(folder):
    (folder / "manifest.json").write_bytes(b"\0" * 50)


def no_manifest(folder):
    (folder / "manifest.json").unlink()


def of_another_step(folder):
    (folder / "optimizer.safetensors").write_bytes(
        (folder.parent / "step-1/optimizer.safetensors").read_bytes()
    )


def renamed(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "step-1", folder)


def folder_in_place_of_a_file(folder):
    lose(folder)
    (folder / "optimizer.safetensors").mkdir()


def pipe(name):
    def damage(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


DAMAGES = [
    (pipe("manifest.json"), r"manifest\.json is no regular file"),
    (pipe("weights.safetensors"), r"weights\.safetensors is no regular file"),
    (truncate, r"weights\.safetensors has \d+ bytes: it was written with \d+"),
    (flip, r"optimizer\.safetensors was changed after it was written"),
    (lose, r"optimizer\.safetensors is missing"),
    (garbage, r"manifest\.json is not JSON"),
    (no_manifest, r"manifest\.json is missing"),
    (of_another_step, r"optimizer\.safetensors was changed"),
    (renamed, r"manifest says step 1: its name says 2"),
    (folder_in_place_of_a_file, r"optimizer\.safetensors"),
    (lambda folder: (shutil.rmtree(folder), folder.write_text("")), r"step-2"),
    (lambda folder: (shutil.rmtree(folder), folder.symlink_to("nowhere")), r"step-2"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_k04_a_broken_one_is_left_out_with_the_reason_and_stays(damage, reason, checkpoint, tmp_path):
    checkpoint(1)
    damage(checkpoint(2))
    before = listing(tmp_path / "checkpoints") if not (tmp_path / "checkpoints/step-2").is_symlink() else None
    with pytest.warns(UserWarning, match=rf"step-2 is left out: .*{reason}"):
        assert newest(tmp_path / "checkpoints").step == 1
    assert before is None or listing(tmp_path / "checkpoints") == before


def test_every_flipped_byte_of_every_file_is_noticed(checkpoint, tmp_path):
    folder = checkpoint(2)
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 7):
            broken = bytearray(content)
            broken[place] ^= 16
            file.write_bytes(broken)
            step, reasons = found(tmp_path / "checkpoints")
            assert (step, len(reasons)) == (None, 1), (file.name, place)
        file.write_bytes(content)
    assert found(tmp_path / "checkpoints") == (2, [])


def test_names_of_others_and_unfinished_ones_are_no_checkpoints(checkpoint, tmp_path):
    folder = tmp_path / "checkpoints"
    source = checkpoint(1)
    for name in ("step-02", "step-3.copy", "best", ".step-4-0123456789ab.part", "step-x", "step--5"):
        shutil.copytree(source, folder / name)
    before = listing(folder)
    assert found(folder) == (1, [])
    assert listing(folder) == before


def test_a_linked_checkpoint_and_a_linked_folder_are_read(checkpoint, tmp_path):
    checkpoint(1)
    elsewhere = tmp_path / "elsewhere"
    checkpoint(2).rename(elsewhere)
    (tmp_path / "checkpoints/step-2").symlink_to(elsewhere)
    (tmp_path / "linked").symlink_to(tmp_path / "checkpoints")
    assert found(tmp_path / "linked") == (2, [])


def test_a_run_that_died_while_it_replaced_one_leaves_the_old_one_to_readers(checkpoint, tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoint(1)
    checkpoint(2).rename(folder / "step-2.replaced")
    assert found(folder) == (2, [])


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "manifest.json", "x.safetensors"]
)
def test_a_pickle_planted_in_any_file_never_runs(name, signed, checkpoint, tmp_path):
    folder = checkpoint(1)
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    (folder / name).write_bytes(bomb)
    if signed and name != "manifest.json":  # even with a manifest that names it
        body = json.loads((folder / "manifest.json").read_bytes())
        body.pop("sha256")
        body["files"][name] = {"size": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
        text = json.dumps(body, indent=1).encode() + b"\n"
        signature = {"sha256": hashlib.sha256(text).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps({**body, **signature}, indent=1) + "\n")
    read = newest(tmp_path / "checkpoints", lambda text: None)
    if read is not None:
        broken = {
            "weights.safetensors": read.weights,
            "optimizer.safetensors": lambda: read.part("optimizer"),
        }
        for file in broken.keys() & {name}:
            with pytest.raises(UsageError, match="is not a safetensors file"):
                broken[file]()
    assert (read is not None) == (name == "x.safetensors" or (signed and name != "manifest.json"))
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists()


def test_nothing_in_the_room_can_unpickle():
    for path in Path(kway.checkpoints.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names} | {
                    getattr(node, "module", "") or ""
                }
                assert not names & {"pickle", "cloudpickle", "shelve", "dill", "joblib"}, path
            if isinstance(node, ast.Attribute) and node.attr == "load":
                assert ast.unparse(node) not in {"torch.load", "np.load", "numpy.load"}, path


def test_an_unknown_part_lists_the_known_ones(checkpoint):
    with pytest.raises(UsageError, match="no part 'ema': it has optimizer, schedule"):
        open_checkpoint(checkpoint(1, schedule={})).part("ema")


def test_k07_files_name_no_device_and_load_on_the_cpu(checkpoint):
    folder = checkpoint(1)
    assert all(
        b"cuda" not in path.read_bytes() and b"cpu" not in path.read_bytes() for path in folder.iterdir()
    )
    assert {tensor.device.type for tensor in open_checkpoint(folder).weights().values()} == {"cpu"}


def test_a_reader_beside_a_writer_always_finds_a_whole_one(checkpoint, tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoint(0)
    stop = threading.Event()
    written = []

    def write():
        step = 1
        while not stop.is_set():
            write_checkpoint(folder, freeze(snapshot(step), {}))
            remove_older(folder, step, 1)
            written.append(step)
            step += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(60):
            floor = written[-1] if written else 0
            warnings: list[str] = []
            read = newest(folder, warnings.append)
            assert warnings == []
            assert read.step >= floor
    finally:
        stop.set()
        thread.join()


def test_all_gone_meanwhile_is_none(checkpoint, tmp_path):
    discard(checkpoint(4), 4)
    assert newest(tmp_path / "checkpoints") is None
    assert list((tmp_path / "checkpoints").iterdir()) == []
