import functools
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from kway.errors import UsageError
from kway.launch.blame import dump_call, dump_value


@dataclass
class Data:
    rows: list = field(default_factory=lambda: [1, 2])
    lock: Any = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Job:
    data: Any
    name: str = "job"


def task(context, job, *rest):
    return job


def refusal(call, *arguments):
    with pytest.raises(UsageError) as caught:
        dump_call(call, arguments, None)
    return str(caught.value)


@pytest.mark.starts
@pytest.mark.parametrize("count", [1, 40])
def test_a_full_disk_is_not_blamed_on_what_was_to_be_sent(tmp_path, count):
    """A limit on the size of files stands for it; also one that is met by what the first writes left over."""
    code = (
        "import resource, sys, pathlib, numpy\n"
        "from kway.errors import UsageError\n"
        "from kway.launch.blame import dump_call, dump_value\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (99_968, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        f"data = [numpy.ones(100_000 // {count} + 9_000) for _ in range({count})]\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "for send in (lambda: dump_call(print, (1, data), folder), lambda: dump_value('data', data, folder)):\n"
        "    try:\n"
        "        send()\n"
        "    except UsageError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    # How much is free changes with what others do.
    first, second = (
        re.sub(r", [\d,]+ bytes are free", ", N bytes are free", line) for line in done.stdout.splitlines()
    )
    assert first == second
    assert first.startswith(f"the temporary folder {tmp_path} cannot take the job's data: File too large, ")
    assert " bytes are to be written, " in first
    assert first.endswith(" bytes are free; set TMPDIR to a folder with room")
    assert not list(tmp_path.iterdir())


def test_the_path_goes_through_attributes_from_the_parameter_name():
    text = refusal(task, Job(Data()))
    assert text.startswith("job.data.lock: a '_thread.lock' cannot be sent to other processes")
    assert "__getstate__" in text


def test_the_path_goes_through_containers_and_unnamed_arguments(tmp_path):
    with (tmp_path / "file").open("w") as file:
        text = refusal(task, 1, {"a": [0, (file,)]})
    assert text.startswith("argument 2['a'][1][0]: a '_io.TextIOWrapper'")


def test_what_the_user_knows_by_name_is_not_called_by_a_number():
    text = refusal(lambda *all_of_it: None, 1, Job(Data()))
    assert text.startswith("data.lock: a '_thread.lock'")


def test_a_generator_in_a_partial():
    text = refusal(task, functools.partial(print, end=(x for x in [1])))
    assert text.startswith("job.keywords['end']: a 'generator'")


def test_modules_are_named_as_their_owners_name_them():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    model[1].lock = threading.Lock()
    assert refusal(task, model).startswith("job.1.lock: ")


def test_closures_are_looked_into():
    lock = threading.Lock()

    def uses(context):
        return lock

    assert "uses.lock: a '_thread.lock'" in refusal(uses)


def test_one_value_by_name():
    with pytest.raises(UsageError, match=r"the result\[0\]: a '_thread.lock'"):
        dump_value("the result", [threading.Lock()])


def test_what_travels_is_not_refused():
    assert dump_call(task, (Job([1]),), None)
