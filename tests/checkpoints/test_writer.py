"""Saving in the background: the copy is taken at once, one save is in flight, a failure never reaches training."""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.checkpoints.snapshots import snapshot

from kway.checkpoints import writer as module
from kway.checkpoints.reading import newest, open_checkpoint
from kway.checkpoints.snapshot import Snapshot
from kway.checkpoints.writer import Writer
from kway.errors import UsageError


def names(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def gate(monkeypatch):
    """Holds each write until it is opened."""
    opened = threading.Event()
    write = module.write_checkpoint

    def held(folder, frozen):
        assert opened.wait(30)
        return write(folder, frozen)

    monkeypatch.setattr(module, "write_checkpoint", held)
    yield opened
    opened.set()


def test_what_is_saved_is_the_state_at_the_call(gate, tmp_path):
    weight, average = torch.ones(1000), torch.ones(3, 4).to(torch.bfloat16)
    with Writer(tmp_path / "c") as writer:
        writer.save(Snapshot(1, 0, {"w": weight}, {"ema": {"w": average, "number": [1]}}))
        weight.zero_()
        average.zero_()
        assert writer.saved == []
        assert not (tmp_path / "c").exists()
        gate.set()
    assert writer.saved == [1]
    assert newest(tmp_path / "c").weights()["w"].sum() == 1000
    assert newest(tmp_path / "c").part("ema")["w"].sum() == 12


def test_one_save_is_in_flight_and_the_next_says_how_long_it_waited(gate, tmp_path):
    with Writer(tmp_path / "c") as writer:
        assert writer.save(snapshot(1)) < 0.05
        threading.Timer(0.3, gate.set).start()
        waited = writer.save(snapshot(2))
        assert 0.2 < waited < 5
        # The second may be there by now.
        assert writer.saved[0] == 1
        assert writer.waited_s == pytest.approx(waited, abs=0.05)
        assert writer.held_s >= writer.waited_s
    assert writer.saved == [1, 2]


def test_wait_returns_when_the_save_is_durable(tmp_path):
    writer = Writer(tmp_path / "c")
    writer.wait()
    for step in range(5):
        writer.save(snapshot(step))
        writer.wait()
        assert newest(tmp_path / "c").step == step
    writer.close()
    writer.close()
    with pytest.raises(UsageError, match="closed writer"):
        writer.save(snapshot(9))
    assert writer.saved == [0, 1, 2, 3, 4]


def test_what_was_prepared_is_copied_when_it_is_saved(tmp_path):
    weight = torch.ones(10)
    with Writer(tmp_path / "c") as writer:
        writer.save(Snapshot(1, 0, {"w": weight}, {}))
        prepared = writer.prepare(Snapshot(2, 0, {"w": weight}, {"early": {"w": weight}}))
        assert writer.saved == [1]
        weight.fill_(3)
        prepared.add("late", {"number": 7, "w": weight})
        writer.save(prepared)
        weight.zero_()
    read = newest(tmp_path / "c")
    assert [float(held["w"].sum()) for held in (read.weights(), read.part("early"), read.part("late"))] == [
        30
    ] * 3
    assert read.part("late")["number"] == 7
    with pytest.raises(UsageError, match="closed writer"):
        writer.save(prepared)
    with pytest.raises(UsageError, match=r"late\['x'\] is a builtins.object"):
        prepared.add("late", {"x": object()})


def test_leaving_with_an_error_waits_too(gate, tmp_path):
    def leave():
        with Writer(tmp_path / "c") as writer:
            writer.save(snapshot(1))
            threading.Timer(0.1, gate.set).start()
            raise KeyError("x")

    with pytest.raises(KeyError):
        leave()
    assert newest(tmp_path / "c").step == 1


def test_keep_holds_after_every_save(tmp_path):
    with Writer(tmp_path / "c", keep=2) as writer:
        for step in range(6):
            writer.save(snapshot(step))
            writer.wait()
            assert names(tmp_path / "c") == sorted(f"step-{s}" for s in (step - 1, step) if s >= 0)
    assert writer.notices == []


def test_memory_for_copies_is_used_again_and_each_checkpoint_is_right(tmp_path):
    copies = set()
    with Writer(tmp_path / "c") as writer:
        for step in (1, 2, 3):
            writer.save(snapshot(step))
            copies.add(writer._copies["weights"]._on_cpu["w"].data_ptr())
        writer.save(snapshot(4, size=5))
    assert len(copies) == 1
    for step in (1, 2, 3, 4):
        read = open_checkpoint(tmp_path / f"c/step-{step}")
        assert set(read.weights()["w"].flatten().tolist()) == {float(step)}
        assert set(read.part("optimizer")["w"]["exp_avg"].tolist()) == {float(step)}


def test_the_same_step_twice_is_saved_twice(tmp_path):
    with Writer(tmp_path / "c", keep=1) as writer:
        writer.save(snapshot(5, note=1))
        writer.save(snapshot(5, note=2))
    assert (writer.saved, writer.failed) == ([5, 5], None)
    assert newest(tmp_path / "c").part("note") == 2


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_must_leave_one(keep, tmp_path):
    with pytest.raises(UsageError, match=f"keep={keep}: at least 1 checkpoint"):
        Writer(tmp_path, keep)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "c").write_text("")
    with pytest.raises(UsageError, match="c is a file: checkpoints need a folder; choose another"):
        Writer(tmp_path / "c")


def test_what_cannot_be_stored_raises_at_once_and_writes_nothing(tmp_path):
    with Writer(tmp_path / "c") as writer:
        with pytest.raises(UsageError, match=r"schedule\['f'\] is a builtins.function"):
            writer.save(snapshot(1, schedule={"f": lambda: 0}))
        assert not (tmp_path / "c").exists()
        writer.save(snapshot(2))
    assert writer.saved == [2]


def test_a_folder_that_goes_away_fails_and_the_next_save_tries_again(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with Writer(run / "c") as writer:
        writer.save(snapshot(1))
        writer.wait()
        (run).rename(tmp_path / "moved")
        for step in (2, 3):
            writer.save(snapshot(step))
            writer.wait()
        assert writer.saved == [1]
        assert writer.failures == 2
        assert writer.failed.startswith(
            f"checkpoint of step 3 was not written to {run}/c (No such file or directory"
        )
        assert not run.exists()
        assert newest(tmp_path / "moved/c").step == 1
        (tmp_path / "moved").rename(run)
        writer.save(snapshot(4))
    assert (writer.saved, writer.failed, writer.failures) == ([1, 4], None, 2)
    assert names(run / "c") == ["step-1", "step-4"]


def test_a_file_in_the_way_fails_the_save_alone(tmp_path):
    with Writer(tmp_path / "c") as writer:
        writer.save(snapshot(1))
        writer.wait()
        (tmp_path / "c/step-2").write_text("mine")
        writer.save(snapshot(2))
        writer.wait()
        assert "step-2 exists: it is no checkpoint that kway may replace" in writer.failed
        writer.save(snapshot(3))
    assert writer.saved == [1, 3]
    assert names(tmp_path / "c") == ["step-1", "step-2", "step-3"]


def test_a_folder_that_turns_read_only_fails_the_save_alone(tmp_path):
    folder = tmp_path / "c"
    with Writer(folder) as writer:
        writer.save(snapshot(1))
        writer.wait()
        folder.chmod(0o555)
        try:
            try:
                (folder / "probe").mkdir()
                pytest.skip("this user may write into read-only folders (root)")
            except PermissionError:
                pass
            writer.save(snapshot(2))
            writer.wait()
        finally:
            folder.chmod(0o755)
        assert "Permission denied" in writer.failed
        writer.save(snapshot(3))
    assert writer.saved == [1, 3]
    assert names(folder) == ["step-1", "step-3"]


def limited(path: str) -> None:
    """In a child: save small, then too large a state for the limit on file sizes, then small again."""
    Path(path).mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with Writer(Path(path) / "c", keep=1) as writer:
        for step, size in ((1, 10), (2, 1_000_000), (3, 100_000), (4, 10)):
            writer.save(Snapshot(step, 0, {"w": torch.full((size,), float(step))}, {}))
            writer.wait()
            print(step, names(Path(path) / "c"), writer.saved, writer.failures, writer.failed)


@pytest.mark.usefixtures("forked_commands")
def test_a_disk_that_is_full_fails_the_save_and_leaves_the_older_one(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    code += f"from tests.checkpoints.test_writer import limited; limited({str(tmp_path / 'run')!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "1 ['step-1'] [1] 0 None"
    assert lines[1].startswith("2 ['step-1'] [1] 1 checkpoint of step 2 was not written")
    assert "(File too large" in lines[1]
    assert "it needs 4000000 bytes" in lines[1]
    assert lines[2].startswith("3 ['step-1'] [1] 2 checkpoint of step 3 was not written")
    assert lines[3] == "4 ['step-4'] [1, 4] 2 None"
    assert newest(tmp_path / "run/c").weights()["w"].tolist() == [4.0] * 10


def test_no_memory_for_the_copy_fails_the_save_alone(tmp_path, monkeypatch):
    from kway.checkpoints.copies import Copies

    def none_left(self, tensors):
        raise RuntimeError("not enough memory")

    with Writer(tmp_path / "c") as writer:
        with monkeypatch.context() as patch:
            patch.setattr(Copies, "take", none_left)
            writer.save(snapshot(1))
        assert "no memory for a copy of the state: not enough memory" in writer.failed
        writer.save(snapshot(2))
    assert (writer.saved, writer.failures) == ([2], 1)


@pytest.mark.usefixtures("forked_commands")
def test_a_process_that_ends_without_closing_is_not_held_up(tmp_path):
    code = (
        "import sys, time, torch; from pathlib import Path\n"
        "from kway.checkpoints import writer\n"
        "writer.write_checkpoint = lambda *a: time.sleep(60)\n"
        "from kway.checkpoints.snapshot import Snapshot\n"
        "writer.Writer(Path(sys.argv[1])).save(Snapshot(1, 0, {}, {}))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=True, timeout=40)


def test_h05_one_rank_saves_while_the_others_go_on(ranks, tmp_path):
    folder = str(tmp_path / "c")

    def body(context, folder):
        import torch
        import torch.distributed as dist

        from kway.checkpoints.snapshot import Snapshot
        from kway.checkpoints.writer import Writer

        weight = torch.full((4, 4), 1.0)
        if context.world.rank == 0:  # guarded, as people do it
            with Writer(Path(folder)) as writer:
                writer.save(Snapshot(1, 0, {"weight": weight}, {}))
        dist.all_reduce(weight)
        return weight.sum().item()

    assert ranks.run(body, folder, size=2) == [32.0, 32.0]
    assert newest(Path(folder)).weights()["weight"].sum() == 16
