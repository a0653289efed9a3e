import itertools
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kway.errors import UsageError
from kway.launch.descriptors import open_missing
from kway.launch.local import Ranks

LAUNCHED = """
import os, sys
for number in CLOSED:
    os.close(number)
from kway.launch.local import run

def task(context):
    context.emit(context.world.rank)
    return context.world.rank

heard = []
assert run(task, ["cpu"] * 2, on_event=heard.append) == [0, 1]
assert sorted(heard) == [0, 1]
open(sys.argv[1], "w").write("done")
"""


def test_open_descriptors_stay_as_they_are():
    before = [os.fstat(number) for number in range(3)]
    open_missing()
    assert all(os.path.samestat(os.fstat(n), stat) for n, stat in enumerate(before))


@pytest.mark.parametrize("closed", [[0], [1], [0, 1], [0, 1, 2], [0, 2]])
def test_missing_ones_are_the_null_device_and_passed_on(closed):
    code = (
        f"import os\nfor n in {closed}: os.close(n)\n"
        "from kway.launch.descriptors import open_missing\nopen_missing()\n"
        f"null = os.stat(os.devnull)\nassert all(os.path.samestat(os.fstat(n), null) for n in {closed})\n"
        f"assert all(os.get_inheritable(n) for n in {closed})\n"
        "assert os.open(os.devnull, os.O_RDONLY) > 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.starts
@pytest.mark.timeout(90)
def test_ranks_meet_though_their_parent_has_no_standard_input(tmp_path, leftovers):
    """Their listening socket would get its number, which each rank's own standard input then takes."""
    code = LAUNCHED.replace("CLOSED", "[0, 1]")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "done")], check=True, timeout=80)
    assert (tmp_path / "done").read_text() == "done"


def test_too_few_files_for_ranks_are_an_error_that_says_how_many_are_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = Ranks(["cpu"] * 2, group=False)
    taken = {int(path.name) for path in Path("/dev/fd").iterdir()}
    free = (number for number in itertools.count() if number not in taken)
    # Enough to make the folder and the guard, too few for two ranks.
    resource.setrlimit(resource.RLIMIT_NOFILE, (list(itertools.islice(free, 9))[-1] + 1, usual[1]))
    try:
        with pytest.raises(UsageError, match=r"2 ranks where .* about 46 are needed; .*ulimit -n 1024"):
            ranks.run(lambda context: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert [*tmp_path.iterdir()] == []
