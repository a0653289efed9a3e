import functools
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


def test_the_path_goes_through_attributes_from_the_parameter_name():
    text = refusal(task, Job(Data()))
    assert text.startswith("job.data.lock: a '_thread.lock' cannot be sent to other processes")
    assert "__getstate__" in text


def test_the_path_goes_through_containers_and_unnamed_arguments(tmp_path):
    with (tmp_path / "file").open("w") as file:
        text = refusal(task, 1, {"a": [0, (file,)]})
    assert text.startswith("argument 2['a'][1][0]: a '_io.TextIOWrapper'")


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
