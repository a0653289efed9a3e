"""What is said, and which exit code is left, when a run is ended before its time."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from hashlib import sha256

import pytest
import torch
from torch import nn

import kway
from kway.errors import KwayError, StoppedError, UsageError
from kway.jobs.leaving import last_complete, says_what_is_there
from kway.launch.interrupt import EndedBySignal
from kway.world import StopRequest

X = torch.linspace(-1, 1, 24).unsqueeze(1)


def job():
    return kway.Job(
        model=lambda: nn.Linear(1, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(X, 2 * X),
        batch_size=6,
    )


def train(ranks, out, size=1, **more):
    return kway.train(
        job(),
        devices=f"cpu:{size}",
        ranks=ranks,
        out=out,
        **{"epochs": 2, "checkpoint_every": "2steps", **more},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    train(None, folder, steps=4)
    (folder / "train.json").unlink()
    return folder


def removed(folder):
    """Remove a folder into which a rank may be writing meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def at(event, act):
    """Return a callback that calls ``act`` at the first event of this name."""
    done = []

    def hear(name, record):
        if name == event and not done:
            done.append(name)
            act()

    return hear


def test_a_signal_to_one_rank_is_named_with_it(ranks, tmp_path):
    class Told(nn.Linear):
        def forward(self, x):
            if os.environ.get("RANK") == "1":
                os.kill(os.getpid(), signal.SIGUSR1)
            return super().forward(x)

    told = replace(job(), model=lambda: Told(1, 1))
    with pytest.raises(StoppedError, match="stopped by SIGUSR1 to rank 1 after step"):
        kway.train(told, devices="cpu:2", ranks=ranks, out=tmp_path / "run")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_the_folder_is_refused_and_the_first_is_whole(ranks, tmp_path, size, resume):
    refused = []

    def second():
        with pytest.raises(UsageError, match="another run is at work in") as caught:
            train(ranks, tmp_path / "run", resume=resume)
        refused.append(caught.value.exit_code)

    run = train(ranks, tmp_path / "run", size, callbacks=[at("start", second)])
    assert refused == [2]
    assert (
        json.loads((tmp_path / "run" / "train.json").read_text())["weights_sha256"]
        == run.record.weights_sha256
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_folder_that_goes_away_is_one_true_error(ranks, tmp_path, size, how):
    folder = tmp_path / "run"
    act = partial(removed, folder) if how == "removed" else partial(folder.rename, tmp_path / "moved")
    # Ranks do not wait for the callback: where they are done before it, they say that.
    said = "removed or renamed while the run was at work|and weights.safetensors was written before"
    with pytest.raises(KwayError, match=said) as caught:
        train(ranks, folder, size, checkpoint_every=None, callbacks=[at("epoch", act)])
    assert caught.value.exit_code == 1
    assert "--resume " not in str(caught.value)
    assert not folder.exists()


def test_a_run_that_is_stopped_when_its_folder_was_renamed_says_where_its_checkpoints_are(ranks, tmp_path):
    folder = tmp_path / "run"

    class Stopped(nn.Linear):
        """Renames the folder once there is a checkpoint in it, and then asks for the end."""

        def forward(self, x):
            if (folder / "checkpoints" / "step-2").is_dir():
                folder.rename(tmp_path / "moved")
                signal.raise_signal(signal.SIGUSR1)
            time.sleep(0.01)
            return super().forward(x)

    stopped = replace(job(), model=lambda: Stopped(1, 1))
    with pytest.raises(KwayError, match=r"stopped by SIGUSR1.* without a checkpoint of it") as caught:
        kway.train(
            stopped,
            devices="cpu:1",
            ranks=ranks,
            out=folder,
            epochs=100,
            checkpoint_every="2steps",
            keep=1000,
        )
    assert caught.value.exit_code == 1
    assert caught.value.need == "what it had saved went with the folder"
    assert "--resume-from" in caught.value.do
    assert "next save" not in str(caught.value)
    assert (tmp_path / "moved" / "checkpoints" / "step-2").is_dir()


def test_ctrl_c_says_what_can_be_gone_on_with(saved):
    with pytest.raises(KeyboardInterrupt) as caught, says_what_is_there(saved, StopRequest(), [], True):
        raise KeyboardInterrupt
    (note,) = caught.value.__notes__
    assert note.startswith(f"{saved}/checkpoints/step-4 is complete; go on with --resume --out {saved}")


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        (True, "no checkpoint is complete yet"),
        (False, "was saved; --checkpoint-every (checkpoint_every=) saves"),
    ],
)
def test_without_a_checkpoint_nothing_is_promised(tmp_path, saves, said):
    with pytest.raises(KeyboardInterrupt) as caught, says_what_is_there(tmp_path, StopRequest(), [], saves):
        raise KeyboardInterrupt
    (note,) = caught.value.__notes__
    assert said in note
    assert "--resume" not in note


def test_a_second_order_is_no_loss_where_the_checkpoint_of_the_first_is_there(saved):
    stop = StopRequest("SIGTERM")
    with (
        pytest.raises(StoppedError, match="stopped by SIGTERM after step 4") as caught,
        says_what_is_there(saved, stop, [4], True),
    ):
        raise EndedBySignal(signal.SIGTERM)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("begun", [[], [5]])
def test_a_second_order_ends_the_run_where_that_checkpoint_is_not_there(saved, begun):
    with (
        pytest.raises(EndedBySignal) as caught,
        says_what_is_there(saved, StopRequest("SIGTERM"), begun, True),
    ):
        raise EndedBySignal(signal.SIGTERM)
    assert caught.value.code == 143


def test_a_broken_checkpoint_is_not_the_last(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-4" / "manifest.json").write_text("{}")
    assert last_complete(tmp_path / "run" / "checkpoints") == 2


def test_a_run_without_a_folder_that_a_signal_ends_says_that_nothing_was_saved(ranks, capsys):
    act = partial(signal.raise_signal, signal.SIGTERM)
    with pytest.raises(EndedBySignal) as caught:
        train(ranks, None, 2, checkpoint_every=None, callbacks=[at("start", act)])
    assert caught.value.code == 143
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kway: ended by SIGTERM: nothing was saved")
    assert line.endswith("name one with out=")


@pytest.mark.parametrize("part", ["run", "job", "options", "plan"])
def test_a_manifest_whose_parts_are_of_another_kind_is_refused(saved, tmp_path, part):
    path = shutil.copytree(saved / "checkpoints" / "step-2", tmp_path / "step-2") / "manifest.json"
    body = json.loads(path.read_bytes())
    body["parts"][part] = None
    del body["sha256"]
    unsigned = json.dumps(body, indent=1).encode() + b"\n"
    body["sha256"] = sha256(unsigned).hexdigest()
    path.write_bytes(json.dumps(body, indent=1).encode() + b"\n")
    with pytest.raises(UsageError, match=f"the part '{part}' of checkpoint .* is none"):
        train(None, tmp_path / "run", resume=path.parent)
    assert not (tmp_path / "run").exists()


def test_a_path_that_no_folder_can_have_is_no_run_to_go_on_from(tmp_path):
    for more in ({"out": tmp_path / "run", "resume": "x" * 256}, {"out": "x" * 256, "resume": True}):
        with pytest.raises(UsageError, match="File name too long"):
            kway.train(job(), devices="cpu:1", **more)
    assert not (tmp_path / "run").exists()
