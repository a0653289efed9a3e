import os
import signal
import subprocess
import sys
import time

import pytest

from kway.errors import RankError, UsageError
from kway.launch.script import check, launch

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("leftovers")]


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text("import os, sys, time\nrank = int(os.environ.get('RANK', -1))\n" + text)
        return str(path)

    return write


def test_each_rank_runs_the_script_as_main_with_its_arguments(script, capsys, tmp_path):
    path = script(
        "import beside\nprint(__name__, sys.argv[1:], os.environ['WORLD_SIZE'], rank, __file__, beside.here)"
    )
    (tmp_path / "beside.py").write_text("here = 'found'")
    launch(path, ["--lr", "1"], ["cpu"] * 2, threads=1)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[rank {rank}] __main__ ['--lr', '1'] 2 {rank} {path} found" for rank in (0, 1)
    ]


def test_a_module_runs_by_its_name(script, capsys, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    script("print(__name__, __package__, sys.argv[1:])", "package/module.py")
    monkeypatch.chdir(tmp_path)
    launch("package.module", ["a"], ["cpu"] * 2, module=True)
    assert capsys.readouterr().out.count("__main__ package ['a']\n") == 2


def test_what_the_script_defines_can_be_pickled_to_the_very_end(script, capsys):
    path = script(
        "import atexit, pickle\n"
        "class Point: pass\n"
        "def last():\n"
        "    print(type(pickle.loads(pickle.dumps(Point()))).__name__, sorted(n for n in globals() if n == 'Script'))\n"
        "atexit.register(last)\n"
    )
    launch(path, [], ["cpu"] * 2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] Point []", "[rank 1] Point []"]


def test_ranks_that_have_not_met_are_told_of(script):
    apart, met = "", "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    (note,) = launch(script(apart), [], ["cpu"] * 2)
    assert note.startswith("none of the 2 ranks has opened a job of kway's or a process group of torch's: ")
    # It may be one that meets by MPI or sockets.
    assert ", unless they met in another way; " in note
    assert launch(script(apart), [], ["cpu"]) == []
    for text in (met, f"{met}dist.destroy_process_group()"):
        assert launch(script(text), [], ["cpu"] * 2) == []


@pytest.mark.usefixtures("forks")
def test_the_scripts_own_group_meets_at_the_reserved_port(script, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MASTER_PORT", "1")
    path = script(
        "import pathlib, socket, torch, torch.distributed as dist\n"
        "def store_is_up():\n"
        "    with socket.socket() as probe:\n"
        "        return not probe.connect_ex((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))\n"
        "for turn in range(2):\n"
        "    dist.init_process_group('gloo')\n"
        "    total = torch.tensor([rank + 1])\n"
        "    dist.all_reduce(total)\n"
        "    dist.barrier()\n"
        "    dist.destroy_process_group()\n"
        # Who is early meets the store of the first group: rank 0 says when it has taken that down.
        "    down = pathlib.Path(sys.argv[1]) / f'down-{turn}'\n"
        "    while store_is_up() if rank == 0 else not down.exists():\n"
        "        time.sleep(0.01)\n"
        "    down.touch()\n"
        "print(int(total))"
    )
    launch(path, [str(tmp_path)], ["cpu"] * 2, threads=1)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] 3", "[rank 1] 3"]


@pytest.mark.parametrize(
    ("leave", "code", "cause"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("sys.exit(42)", 42, "exit code 42"),
        ("sys.exit('no data')", 1, "SystemExit: no data"),
        ("os._exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        ("this is no Python", 1, "SyntaxError"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_keeps_its_code(script, leave, code, cause, tmp_path):
    began = time.monotonic()
    path = script(f"if rank == 1:\n    {leave}\ntime.sleep(600)")
    with pytest.raises(RankError, match=cause) as caught:
        launch(path, [], ["cpu"] * 2, logs=tmp_path, echo=False)
    assert caught.value.exit_code == code
    assert time.monotonic() - began < 10
    if cause != "SyntaxError":
        assert caught.value.rank == 1
    if code == 1 and "exit" not in leave:
        assert "kway/launch" not in caught.value.traceback
        assert (tmp_path / f"rank-{caught.value.rank}.log").read_text().endswith(caught.value.traceback)


def test_the_failing_rank_may_still_tidy_up(script, capsys):
    path = script(
        "import atexit\natexit.register(lambda: print('tidied'))\n"
        "if rank == 1:\n    raise ValueError('boom')\ntime.sleep(600)"
    )
    with pytest.raises(RankError):
        launch(path, [], ["cpu"] * 2)
    assert capsys.readouterr().out == "[rank 1] tidied\n"


def test_a_rank_may_be_done_before_the_others(script, capsys):
    launch(script("if rank == 0:\n    time.sleep(0.3)\n    print('done')"), [], ["cpu"] * 2)
    assert capsys.readouterr().out == "[rank 0] done\n"


def test_a_rank_that_left_early_is_the_cause_if_others_needed_it(script):
    path = script(
        "if rank == 1:\n    sys.exit(0)\ntime.sleep(0.3)\nraise RuntimeError('Connection closed by peer')"
    )
    with pytest.raises(RankError, match="ended early") as caught:
        launch(path, [], ["cpu"] * 2, echo=False)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


@pytest.mark.usefixtures("forks")
def test_a_rank_that_left_is_named_beside_one_that_went_on(script):
    path = script(
        "import kway, torch\n"
        "data = torch.ones(8, 1), torch.ones(8, 1)\n"
        "sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)\n"
        "job = kway.Job(lambda: torch.nn.Linear(1, 1), torch.nn.MSELoss(), sgd, data, batch_size=4)\n"
        "with kway.parallel(job) as p:\n"
        "    for share in p.batches(0):\n"
        "        p.step(share)\n"
        "    if rank == 1:\n"
        "        p.step(share)\n"
    )
    with pytest.raises(RankError, match=r"ended early: .*; rank 1 waited for it after step 2$") as caught:
        launch(path, [], ["cpu"] * 2, threads=1, echo=False)
    assert caught.value.rank == 0


def test_a_rank_that_skips_the_end_of_the_script_has_failed_unless_all_do(script):
    with pytest.raises(RankError, match="ended early") as caught:
        launch(script("if rank == 1:\n    os._exit(0)\ntime.sleep(0.3)"), [], ["cpu"] * 2, echo=False)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    launch(script("os._exit(0)"), [], ["cpu"] * 2, echo=False)


@pytest.mark.usefixtures("forks")
def test_a_loader_worker_of_the_script_that_dies_is_named(script):
    path = script(
        "import torch\n"
        "class Mine(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index):\n"
        "        if index == 5 and rank == 1: os.kill(os.getpid(), 7)\n"
        "        return 1.0\n"
        # Plain numbers: a tensor is fetched from its worker, which may die in the middle of that instead.
        "for _ in torch.utils.data.DataLoader(Mine(), num_workers=2, collate_fn=list): pass\n"
    )
    with pytest.raises(RankError, match="DataLoader worker") as caught:
        launch(path, [], ["cpu"] * 2, threads=1, echo=False)
    assert caught.value.rank == 1
    assert "/dev/shm holds" in caught.value.cause
    assert "loader worker 1 of rank 1" in caught.value.cause


def test_a_failure_of_its_own_is_not_blamed_on_who_left_early(script):
    path = script("if rank == 1:\n    sys.exit(0)\ntime.sleep(0.3)\nraise ValueError('mine')")
    with pytest.raises(RankError, match="mine") as caught:
        launch(path, [], ["cpu"] * 2, echo=False)
    assert caught.value.rank == 0


TEE = "class Tee:\n    def write(self, text): pass\nsys.stdout = {'tee': Tee(), 'none': None}[sys.argv[1]]\n"


@pytest.mark.parametrize("replaced", ["tee", "none"])
def test_a_replaced_stream_hides_no_cause(script, replaced):
    # The other rank leaves first: with 120, as Python does where its stream cannot be flushed.
    path = script(TEE + "if rank == 1:\n    time.sleep(0.5)\n    raise ValueError('the cause')")
    with pytest.raises(RankError, match="ValueError: the cause") as caught:
        launch(path, [replaced], ["cpu"] * 2, echo=False)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


def test_a_stream_that_cannot_be_flushed_fails_a_script_as_it_does_in_python(script):
    with pytest.raises(RankError, match=r"exit code 120 \(Python's own: sys.stdout") as caught:
        launch(script(TEE), ["tee"], ["cpu"] * 2, echo=False)
    assert caught.value.exit_code == 120
    launch(script(TEE), ["none"], ["cpu"] * 2, echo=False)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("replaced", ["tee", "none"])
def test_a_rank_that_left_is_blamed_with_who_waited_whatever_became_of_its_output(script, replaced):
    path = script(
        TEE + "from kway.launch.status import STEP, here\n"
        "status = here()\n"
        "status.at(STEP, 2)\n"
        "if rank == 1:\n"
        "    with status.waiting.inside('all-reduce'): time.sleep(0.5)\n"
        "    raise RuntimeError('Connection closed by peer')\n"
        # Before or after it is missed.
        "time.sleep(float(sys.argv[2]))\n"
    )
    for leaves in ("0", "0.8"):
        with pytest.raises(RankError, match=r"; rank 1 waited for it in step 2$") as caught:
            launch(path, [replaced, leaves], ["cpu"] * 2, echo=False)
        code = 120 if replaced == "tee" else 0
        assert f"ended early: its process left with exit code {code}" in str(caught.value)
        assert (caught.value.rank, caught.value.exit_code) == (0, code or 1)


def test_temporary_files_of_multiprocessing_go_with_the_script(script, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = script("from multiprocessing.util import get_temp_dir\nget_temp_dir()\nos._exit(3)")
    with pytest.raises(RankError, match="exit code 3"):
        launch(path, [], ["cpu"] * 2, echo=False)
    assert [*tmp_path.iterdir()] == [tmp_path / "script.py"]


def test_no_warning_of_the_scripts_own_is_silenced(script, capsys):
    launch(script("print(sys.warnoptions)"), [], ["cpu"] * 2)
    assert capsys.readouterr().out.count("[]\n") == 2


def test_one_device_is_no_rank(script, tmp_path):
    launch(script("print(rank, os.environ.get('MASTER_PORT'))"), [], ["cpu"], logs=tmp_path, echo=False)
    assert (tmp_path / "rank-0.log").read_text() == "-1 None\n"


def test_standard_input_is_empty(script, capsys):
    launch(script("print(repr(sys.stdin.read()))"), [], ["cpu"] * 2)
    assert set(capsys.readouterr().out.splitlines()) == {"[rank 0] ''", "[rank 1] ''"}


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("missing.py", False),
        (".", False),
        *((name, True) for name in ("no_such_module.part", "os.nope", "json.nope", "..x", "", "json.")),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(target, module, leftovers):
    with pytest.raises(UsageError, match=r"no (file|module)"):
        launch(target, [], ["cpu"] * 2, module=module)
    assert leftovers() == {}


def test_a_module_from_a_working_directory_that_was_removed_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the working directory is not there any more") as caught:
        launch("json.tool", [], ["cpu"] * 2, module=True)
    assert caught.value.exit_code == 2


def test_a_working_directory_that_goes_while_a_rank_starts_is_that_error_too(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setattr("kway.launch.script.check", lambda target, module: (tmp_path / "gone").rmdir())
    with pytest.raises(UsageError, match="the working directory is not there any more"):
        launch("json.tool", [], ["cpu"] * 2, module=True)


def test_what_finds_modules_may_be_of_an_old_kind(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    with pytest.raises(UsageError, match="no module 'a_module_that_is_not_there'"):
        check("a_module_that_is_not_there", True)


def test_modules_are_found_without_being_imported(tmp_path, monkeypatch):
    for name in ("package/__init__.py", "package/inner/deep/module.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    for name in ("package", "package.inner.deep.module", "json.tool"):
        check(name, True)
    with pytest.raises(UsageError, match=r"no module 'package.other': "):
        check("package.other.deep", True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_launchers_end_is_the_scripts_end(script, number, leftovers):
    path = script("print('up', flush=True)\ntime.sleep(600)")
    code = f"from kway.launch.script import launch\nlaunch({path!r}, [], ['cpu'] * 2)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    for _ in range(2):
        assert b"up" in parent.stdout.readline()
    parent.send_signal(number)
    parent.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert leftovers() == {}
