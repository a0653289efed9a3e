"""Code that is not what it was when a checkpoint was written is said, and ends no run: a mended fault is a reason."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import kway
from kway.jobs.own_code import code_facts

G = torch.Generator().manual_seed(3)
X, Y = torch.randn(40, 5, generator=G), torch.arange(40) % 3


class Net(nn.Sequential):
    def __init__(self, act=nn.ReLU, p=0.2):
        super().__init__(nn.Linear(5, 8), act(), nn.Dropout(p), nn.Linear(8, 3))


class Doubled(Net):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled_now():
    class Doubled(Net):
        def forward(self, x):
            return 3 * super().forward(x)

    Doubled.__qualname__ = "Doubled"
    return Doubled()


def losses(times):
    """Two functions of one name."""
    plain, tripled = (
        lambda output, target: functional.cross_entropy(output, target, reduction="none"),
        lambda output, target: 3 * functional.cross_entropy(output, target, reduction="none"),
    )
    return tripled if times == 3 else plain


def scaled(factor):
    return lambda output, target: factor * functional.cross_entropy(output, target, reduction="none")


def of_function(rate):
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def job(model=Net, loss=None, **more):
    given = {"optimizer": partial(torch.optim.SGD, lr=0.05), "data": (X, Y), "batch_size": 8, **more}
    return kway.Job(model, losses(1) if loss is None else loss, **given)


def train(given, out=None, **more):
    saves = {} if out is None else {"out": out, "checkpoint_every": 1}
    return kway.train(given, tune=False, **{"devices": "cpu:1", "epochs": 1, **saves, **more})


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    found = {}
    for name, given in {
        "net": job(),
        "doubled": job(Doubled),
        "scaled": job(loss=scaled(2.0)),
        "rate": job(schedule=of_function(lambda n: 0.9**n)),
    }.items():
        found[name] = tmp_path_factory.mktemp("begun") / "run"
        train(given, found[name])
    return found


def said(run):
    return [line for line in run.record.notices if line.startswith("the code of ")]


@pytest.mark.parametrize(
    ("first", "now", "parts"),
    [
        ("net", job(), None),
        ("net", job(loss=losses(3)), "the loss"),
        ("net", job(partial(Net, nn.GELU)), "the model"),
        ("net", job(lambda: Net(p=0.6)), "the model"),
        ("net", job(lambda: Net(p=0.6), losses(3)), "the loss and of the model"),
        ("doubled", job(doubled_now), "the model"),
        ("scaled", job(loss=scaled(2.0)), None),
        ("scaled", job(loss=scaled(2.5)), "the loss"),
        (
            "rate",
            # At a step at which nobody asked for the rate.
            job(schedule=of_function(lambda n: 0.9**n if n != 33 else 0.0)),
            "the schedule",
        ),
    ],
)  # fmt: skip
def test_changed_code_is_a_notice_that_names_the_part(begun, first, now, parts):
    run = train(now, resume=begun[first], epochs=2)
    assert run.record.resumed_from_step == 5
    lines = said(run)
    assert len(lines) == (parts is not None)
    if parts is not None:
        assert lines[0].startswith(f"the code of {parts} is not what it was when the checkpoint was written")


def test_it_is_said_from_several_ranks_and_in_a_loop_of_ones_own(ranks, begun, tmp_path, capsys):
    run = train(job(loss=losses(3)), resume=begun["net"], epochs=2, devices="cpu:2", ranks=ranks)
    assert len(said(run)) == 1
    with kway.parallel(job(), devices="cpu:1") as p:
        p.checkpoint(tmp_path / "kept", 0)
    with kway.parallel(job(loss=losses(3)), devices="cpu:1") as p:
        p.resume(tmp_path / "kept")
    assert "kway: the code of the loss is not what it was" in capsys.readouterr().err


def test_other_versions_or_an_object_that_cannot_be_shown_says_nothing(begun, monkeypatch):
    class Shy(nn.Linear):
        def extra_repr(self):
            raise RuntimeError("not shown")

    assert code_facts(job(), Shy(5, 3))["the model"] == []
    monkeypatch.setattr("kway.jobs.own_code.versions", lambda: {"python": "3.99"})
    assert said(train(job(loss=losses(3)), resume=begun["net"], epochs=2)) == []


def test_a_script_that_is_run_is_not_taken_for_another_than_the_one_that_is_imported(tmp_path):
    def known_as(name):
        found = {"__name__": name}
        text = "import torch\nclass Net(torch.nn.Linear):\n  def forward(self, x):\n    return super().forward(x)"
        exec(text, found)
        return found["Net"]

    train(job(lambda: known_as("__main__")(5, 3)), tmp_path / "run")
    run = train(job(lambda: known_as("script")(5, 3)), resume=tmp_path / "run", epochs=2)
    assert (run.record.resumed_from_step, said(run)) == (5, [])


def test_where_an_object_lies_in_memory_is_no_code():
    class Shown(nn.Linear):
        def extra_repr(self):
            return f"act={object()}"

    assert code_facts(job(), Shown(5, 3)) == code_facts(job(), Shown(5, 3))
