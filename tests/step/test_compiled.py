"""Compiled steps: they compute what eager ones do, and leave the model as it was."""

import gzip
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.step.recorded import opened, share
from torch import nn

import kway
from kway.devices.compilers import missing
from kway.report.timeline import PARTS
from kway.step.attributes import HostState
from kway.step.compiled import CompiledStep, compiling
from kway.step.endings import as_they_are
from kway.step.graph import GraphedStep
from kway.step.losses import rule_for, summed
from kway.step.presence import Presence

pytestmark = pytest.mark.skipif(missing("cpu") is not None, reason=f"torch.compile: {missing('cpu')}")

CPU = torch.device("cpu")
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(11, 3, generator=G), torch.arange(11) % 2
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Says at each call how it runs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        self.how = {True: set(), False: set()}

    def forward(self, x):
        self.how[self.training].add(torch.compiler.is_compiling())
        return self.layers(x)


def job(model=Net, **more):
    more = {"data": (X, Y), "validation": (X, Y), "batch_size": 4, "precision": "fp64", **more}
    return kway.Job(model, nn.CrossEntropyLoss(), SGD, **more)


def test_training_is_compiled_evaluation_is_not_and_nothing_stays():
    eager = kway.train(job(), devices="cpu:1", epochs=2)
    # 11 samples by 4: the last batch has a shape of its own.
    run = kway.train(job(), devices="cpu:1", epochs=2, step_kind="compiled")
    assert (run.record.step_kind, run.plan.step_kind) == ("compiled", "compiled")
    assert run.model.how == {True: {True}, False: {False}}
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=1e-12)
    assert list(run.model.state_dict()) == list(Net().state_dict())
    assert type(run.model) is Net
    assert run.model._compiled_call_impl is None
    assert "forward" not in vars(run.model.layers[1])


def test_a_container_of_torch_is_compiled_too():
    # The compiler passes over what torch's own files define.
    how = set()

    class Tell(nn.Module):
        def forward(self, x):
            how.add(torch.compiler.is_compiling())
            return x

    def container():
        return nn.Sequential(nn.Linear(3, 4), Tell(), nn.Tanh(), nn.Linear(4, 2))

    kway.train(job(container, validation=None), devices="cpu:1", steps=1, epochs=1, step_kind="compiled")
    assert how == {True}
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # As wide as the one above: its compiled code is there, and only how it comes to be asked for is new.
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    eager = kway.train(job(lambda: plain, validation=None), devices="cpu:1", steps=1, epochs=1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted
    again = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    kway.train(job(lambda: again, validation=None), devices="cpu:1", steps=1, epochs=1, step_kind="compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > counted
    assert eager.record.step_kind == "eager"


def test_a_hook_on_a_loss_that_comes_after_another_run_counts():
    # Compiled code is kept by function: that for a loss without the hook is there, for the same class.
    rule = rule_for(nn.MSELoss(), CPU)
    whole = SimpleNamespace(gathered=lambda: None)
    own = {"kept": None, "rule": rule, "device": CPU, "whole_batch": whole, "presence": Presence()}
    core = SimpleNamespace(model=nn.Linear(1, 1), **own)
    compiled = torch.compile(summed, backend="eager", dynamic=False)
    with compiling(core, SimpleNamespace(kind="eager")):
        for hooked, wanted in ((False, 11.0), (True, 22.0)):
            loss = nn.MSELoss(reduction="none")
            if hooked:
                loss.register_forward_hook(lambda module, args, output: output * 2)
            total, _ = compiled(loss, torch.zeros(11), torch.ones(11), "elements", as_they_are, 1.0)
            assert total.item() == wanted


def test_a_model_that_cannot_be_compiled_is_named_with_what_helps():
    # Slow to import: not while tests are collected.
    from torch._dynamo.exc import BackendCompilerFailed

    def fail(*_):
        raise BackendCompilerFailed(fail, ValueError("no such loop"), None)

    core = SimpleNamespace(model=nn.Linear(1, 1), kept=None, rule=rule_for(None, CPU), device=CPU)
    step = CompiledStep(core, SimpleNamespace(kind="eager", notices=[], run=fail))
    with pytest.raises(
        kway.KwayError,
        match="cannot compile the model or its loss: ValueError: no such loop; use a step kind",
    ):
        step.run("share", 0)
    assert core.model._compiled_call_impl is None


def as_on_a_gpu(run, *functions):
    """Make a compiled step whose device says that it is a GPU, around ``run(core, owner)``; and that owner."""
    owner = SimpleNamespace(**{function.__name__: function for function in functions})
    core = SimpleNamespace(
        model=nn.Linear(1, 1), kept=None, device=torch.device("cuda"), compiles=False,
        compilable=lambda: [(owner, name, False) for name in vars(owner)],
    )  # fmt: skip
    inner = SimpleNamespace(kind="eager", notices=[])
    inner.run = lambda *_: run(core, owner)
    return CompiledStep(core, inner), owner


def test_on_a_gpu_the_small_functions_of_a_step_are_compiled_while_it_runs():
    engine, _, _ = opened(nn.Linear(3, 2), optimizer=SGD)
    core, seen = engine._step, {}
    core.device = torch.device("cuda")
    owners = {"summed": core.rule, "packed": core.presence.arithmetic, "combined": core.presence.arithmetic,
              "written": core, "told": core, "right": core}  # fmt: skip
    plain = {name: getattr(owner, name) for name, owner in owners.items()}
    inner = SimpleNamespace(
        kind="eager",
        notices=[],
        run=lambda *_: seen.update(
            {name: getattr(owner, name) for name, owner in owners.items()}, compiles=core.compiles
        ),
    )
    CompiledStep(core, inner).run("share", 0)
    assert seen.pop("compiles")
    assert not core.compiles
    assert not [name for name, function in plain.items() if seen[name] is function]
    assert all(getattr(owner, name) is plain[name] for name, owner in owners.items())
    core.device = CPU
    engine.close()


def test_a_small_function_that_does_not_compile_runs_as_it_is_and_is_named():
    how = []

    @torch.library.custom_op("kway_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @twice.register_fake
    def _(x):
        raise ValueError("no such loop")

    def fails(x):
        return twice(x)

    def works(x):
        how.append(torch.compiler.is_compiling())
        return x + 1

    step, owner = as_on_a_gpu(
        lambda core, own: (own.fails(torch.ones(2)).tolist(), own.works(torch.ones(2)).tolist()), fails, works
    )
    for _ in range(3):
        assert step.run("share", 0) == ([2, 2], [2, 2])
        assert owner.fails is fails
    assert how == [True] * 3
    (notice,) = step.notices
    assert notice.startswith("tests.step.test_compiled.")
    assert ".fails is not compiled: " in notice


def test_what_compiles_a_small_function_is_nothing_that_a_step_keeps():
    """A step in which something is kept by the host from one to the next is not recorded."""

    def works(x):
        return x + 1

    seen, steps = [], []

    def taken(core, owner):
        kept = HostState(core.model, [owner])
        found = owner.works(torch.ones(2)).tolist()
        seen.append(kept.change())
        steps[0].notices.append("a line for the user")
        seen.append(kept.change())
        return found

    step, _ = as_on_a_gpu(taken, works)
    steps.append(step)
    for _ in range(3):
        assert step.run("share", 0) == [2, 2]
    assert seen == [None] * 6


def test_what_is_wrong_with_the_numbers_of_a_small_function_is_no_matter_of_compiling():
    def product(x):
        return x @ torch.ones(3)

    step, owner = as_on_a_gpu(lambda core, own: own.product(torch.ones(2)), product)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            step.run("share", 0)
    assert owner.product is product
    assert not step.notices


def test_what_kway_refuses_inside_the_model_is_said_as_it_is():
    data = X[:5], Y[:5]
    with pytest.raises(kway.RefusedError, match="of one value a channel"):
        kway.train(
            job(data=data, validation=None),
            devices="cpu:1",
            exactness="loose",
            epochs=1,
            step_kind="compiled",
        )


def several_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))


def test_several_devices_keep_bits_with_a_compiled_model(ranks):
    model = several_layers()
    proof = kway.prove(
        job(model, batch_size=5, precision="fp32"),
        devices="1,2",
        exactness="bits",
        shards=2,
        steps=2,
        step_kind="compiled",
        ranks=ranks,
        echo=False,
    )
    assert proof.verdict == "pass", str(proof)
    assert [(row["equal"], row["step_kind"]) for row in proof.candidates] == [("bits", "compiled")] * 2
    assert proof.certificate["holds_within"]["step_kind"] == "compiled"


def test_recorded_steps_of_two_ranks_show_compiled_regions_and_add_up(ranks, tmp_path):
    # Here and not beside the other timelines: these ranks have compiled before.
    data = torch.cat([X, X, X, X]), torch.cat([Y, Y, Y, Y])
    run = kway.train(
        job(several_layers, data=data, validation=None, batch_size=5, precision="fp32"),
        devices="cpu:2",
        step_kind="compiled",
        steps=8,
        timeline=2,
        out=tmp_path / "run",
        ranks=ranks,
        echo=False,
    )
    for row in run.record.timeline["ranks"]:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["step_s"], rel=0.03)
        assert row["compute_s"] > 0
    events = json.loads(gzip.decompress((tmp_path / "run" / "timeline.json.gz").read_bytes()))["traceEvents"]
    compiled = [event["pid"] for event in events if event["name"].startswith("Torch-Compiled Region")]
    # Between two regions of a step the batch statistics are summed.
    assert [compiled.count(rank) for rank in (0, 1)] == [4, 4]


def wrapped(own):
    def forward(x):
        return own(x)

    return forward


@pytest.mark.parametrize("make", [wrapped, partial])
def test_a_layer_with_a_forward_of_the_user_s_trains(make):
    def net():
        made = Net()
        made.layers[1].forward = make(made.layers[1].forward)
        return made

    job_ = job(net)
    given = {"devices": "cpu:1", "exactness": "loose", "epochs": 1}
    eager, compiled = (kway.train(job_, step_kind=kind, **given) for kind in ("eager", "compiled"))
    assert compiled.epochs[-1]["train_loss"] == pytest.approx(eager.epochs[-1]["train_loss"], abs=1e-12)


def test_what_is_put_into_a_model_to_compile_it_is_no_change_between_recorded_steps():
    engine, _, recorder = opened(several_layers(), optimizer=SGD)
    # On a CPU dropout draws on the host.
    engine.model[2].p = 0.0
    graphed = GraphedStep(engine._step, recorder, traced=False)
    with compiling(engine._step, graphed) as step:
        for number in range(9):
            step.run(share(number), number)
    assert [made.replays for made in recorder.made] == [6]
    assert step.notices == []
    graphed.forget()
    engine.close()
