"""Commands that are forked are what commands that are started are."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.commands import forking_commands

pytestmark = [
    pytest.mark.starts,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are started"),
]

SEEN = """
import json, os, pathlib, sys, torch
shown = pathlib.Path("/proc/self/environ").read_bytes().rstrip(b"\\0").split(b"\\0")
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"), "folder": os.getcwd(),
    "input": sys.stdin.read(), "environment": dict(os.environ), "shown": sorted(each.decode() for each in shown),
    "threads": torch.get_num_threads(), "orig_argv": sys.orig_argv[1:],
    "tests": [name for name in sys.modules if name.partition(".")[0] in ("tests", "zygote", "forked")],
}), file=sys.stderr)
sys.exit(7)
"""
RANKS = """
import os, pathlib
from kway.launch.local import run
def task(context):
    return os.getppid(), b"<zygote>" in pathlib.Path("/proc/self/cmdline").read_bytes(), os.getcwd()
if __name__ == "__main__":
    os.chdir("below")
    print(run(task, ["cpu"] * 2, threads=1) == [(os.getpid(), True, os.getcwd())] * 2)
"""


@pytest.mark.parametrize("way", ["file", "-c"])
def test_they_have_what_started_ones_have(zygotes, tmp_path, leftovers, way):
    (tmp_path / "script.py").write_text(SEEN)
    words = [sys.executable, *(["script.py"] if way == "file" else ["-c", SEEN]), "a", "b"]

    def run():
        # Given: that of this process has what libraries have added, which a forked command does not get.
        given = {"cwd": tmp_path, "input": "said", "env": dict(os.environ)}
        done = subprocess.run(words, **given, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (7, "")
        return json.loads(done.stderr)

    started = run()
    with forking_commands(zygotes):
        forked = run()
    different = {name: (forked[name], started[name]) for name in started if forked[name] != started[name]}
    assert not different


def test_their_ranks_are_forked_and_where_they_are(forked_commands, tmp_path, leftovers):
    (tmp_path / "below").mkdir()
    (tmp_path / "script.py").write_text(RANKS)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    ("code", "status"),
    [("1 / 0", 1), ("import os; os._exit(3)", 3), ("import os; os.kill(os.getpid(), 2)", -signal.SIGINT)],
)
def test_they_end_as_started_ones_do(forked_commands, leftovers, code, status):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert ("Error" in done.stderr) == (status == 1)


def test_those_that_live_are_found_by_their_environment(forked_commands, leftovers):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert process.pid in leftovers()
        process.kill()


def test_what_libraries_read_at_the_start_makes_them_start(forked_commands, leftovers):
    code = "import pathlib; print(b'zygote' + b'.py' in pathlib.Path('/proc/self/cmdline').read_bytes())"
    for more, forked in (({}, "True"), ({"PYTHONHASHSEED": "5"}, "False")):
        words, environment = [sys.executable, "-c", code], {**os.environ, **more}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == forked
