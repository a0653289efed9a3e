"""A record is not taken for another model of its name, and is for the same one however often it ran."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn

import kway
from kway.errors import UsageError
from kway.jobs.identity import differs, identity_of
from kway.planned import Planned
from kway.training.surroundings import versions
from kway.workload import Workload

X, Y = torch.randn(64, 8), torch.arange(64) % 3
SGD = partial(torch.optim.SGD, lr=0.1)
SOURCE = """
from torch import nn
class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.seen, self.shapes, self.last_shape = 0, [], None
    def forward(self, x):
        self.seen += 1
        self.shapes.append(x.shape)
        self.last_shape = tuple(x.shape)
        return self.last(self.norm(self.first(x)){more})
"""


def written(more=""):
    names = {"__name__": "of_the_user"}
    exec(SOURCE.format(more=more), names)
    return names["Net"]


NET = written()


def job(model, **more):
    return kway.Job(model, nn.CrossEntropyLoss(), SGD, (X, Y), batch_size=32, **more)


def profiled(model, **changes):
    """Return a workload as a profile of ``model`` leaves it."""
    more = {"model": "Net", "threads": (1, 2), "versions": versions(), "identity": identity_of(model)}
    return workload((8, 16, 32), **{**more, **changes})


def planned(model, given, monkeypatch):
    monkeypatch.setattr("kway.jobs.given._devices", lambda workload, asked: ("cpu", "cpu"))
    return kway.plan(job(model), devices="cpu:1", workload=given, measurements=measurements())


OTHERS = [
    pytest.param(partial(NET, 6), r"Net of 73 parameters.* has Net of 87 parameters;", id="size"),
    pytest.param(
        written(" * 2"), r"Net as its layers or its code were then.* has Net as it is now;", id="code"
    ),
]


@pytest.mark.parametrize(("model", "said"), OTHERS)
def test_a_workload_or_a_plan_of_another_model_of_that_name_is_refused(monkeypatch, model, said):
    given = profiled(NET())
    plan = planned(NET, given, monkeypatch)
    other = partial(model) if isinstance(model, partial) else model
    named = job(other, name="Net")
    with pytest.raises(UsageError, match=f"a workload of model {said} profile it as it is now"):
        kway.plan(named, devices="cpu:1", workload=given, measurements=measurements())
    with pytest.raises(UsageError, match=f"a plan for model {said} plan it anew"):
        kway.train(named, plan=plan, epochs=1)


def test_records_without_it_are_compared_by_what_they_have(monkeypatch):
    old = profiled(NET(), identity={})
    with pytest.raises(UsageError, match=r"Net of 1,000 parameters: the job has Net of 73 parameters;"):
        planned(NET, old, monkeypatch)
    count = {**old.parameters, "count": 73}
    plan = planned(NET, replace(old, parameters=count), monkeypatch)
    assert kway.train(job(written("* 2")), plan=replace(plan, identity={}), epochs=1, echo=False)


def test_the_same_instance_goes_by_its_plan_again_and_again(monkeypatch):
    model = NET()
    plan = planned(model, profiled(model), monkeypatch)
    for _ in range(2):
        assert kway.train(job(model), plan=plan, epochs=1, echo=False).record.predicted_step_s
    assert model.seen == 4
    assert identity_of(model) == identity_of(NET()) == plan.identity


def test_what_is_not_known_is_not_compared():
    lazy = nn.Sequential(nn.LazyLinear(3))
    now, then = identity_of(nn.Linear(2, 3)), identity_of(nn.Linear(2, 3, bias=False))
    assert identity_of(lazy) == {"parameters": None, "code": ""}
    assert differs("net", identity_of(lazy), versions(), now) is None
    assert differs("net", then, {}, now) == ("net of 6 parameters", "net of 9 parameters")
    then = identity_of(nn.Sequential(nn.Linear(2, 3)))
    assert differs("net", then, versions(), now) is not None
    # Of code, what other versions of Python made of it is not what this one makes.
    assert differs("net", then, {**versions(), "python": "3.9.1"}, now) is None


@pytest.mark.parametrize(
    "identity", [3, [], {"parameters": "73", "code": ""}, {"parameters": True, "code": ""}, {"code": 3}]
)
def test_a_record_whose_identity_is_none_is_refused(monkeypatch, identity):
    given = profiled(NET())
    for record, kind in ((given, Workload), (planned(NET, given, monkeypatch), Planned)):
        with pytest.raises(UsageError, match="identity"):
            kind.from_dict({**record.to_dict(), "identity": identity})


def test_a_profile_holds_it():
    record = kway.profile(job(NET), devices="cpu:1", seconds=0.2)
    assert record.identity == identity_of(NET())
    assert Workload.from_dict(record.to_dict()) == record
