"""From a job to an initialised module: seeds, weights to start from, and what goes wrong."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import kway
from kway.launch.interrupt import EndedBySignal
from kway.step.build import build, make_optimizer, make_schedule

SGD = partial(torch.optim.SGD, lr=0.1)


def job_of(model, **more):
    return kway.Job(
        model=model, loss=nn.MSELoss(), optimizer=SGD, data=(torch.ones(2, 2), torch.ones(2)), **more
    )


def net():
    return nn.Linear(2, 2)


def test_a_function_is_called_with_the_seed_of_the_job():
    torch.manual_seed(11)
    expected = net()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    built = build(job_of(net, seed=11))
    assert torch.equal(built.weight, expected.weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(build(job_of(net, seed=12)).weight, expected.weight)


def test_an_instance_is_taken_as_it_is():
    model = net()
    weight = model.weight.clone()
    assert build(job_of(model)) is model
    assert torch.equal(model.weight, weight)


def test_weights_to_start_from(tmp_path):
    state = {"weight": torch.full((2, 2), 3.0), "bias": torch.full((2,), 4.0)}
    save_file(state, tmp_path / "start.safetensors")
    for path in (tmp_path / "start.safetensors", str(tmp_path / "start.safetensors")):
        model = build(job_of(net, init=path))
        assert torch.equal(model.weight, state["weight"])
        assert torch.equal(model.bias, state["bias"])
    model = build(job_of(net, init=lambda model: nn.init.constant_(model.weight, 5.0)))
    assert torch.equal(model.weight, torch.full((2, 2), 5.0))


def test_a_function_that_initialises_draws_from_the_seed():
    first, second = (
        build(job_of(net, init=lambda model: nn.init.normal_(model.bias), seed=3)) for _ in range(2)
    )
    assert torch.equal(first.bias, second.bias)


def test_an_error_of_the_user_s_code_is_shown_with_its_traceback():
    def broken():
        raise RuntimeError("no such layer")

    with pytest.raises(kway.UsageError) as caught:
        build(job_of(broken))
    text = str(caught.value)
    assert "in broken" in text
    assert text.rstrip().endswith("RuntimeError: no such layer")
    with pytest.raises(kway.UsageError, match="init raised ValueError: bad"):
        build(job_of(net, init=lambda model: (_ for _ in ()).throw(ValueError("bad"))))


class Needy(nn.Linear):
    def __init__(self, width, classes=2, *, bias):
        super().__init__(width, classes, bias)


def test_a_function_that_needs_arguments_shows_no_traceback_but_how_it_is_called():
    with pytest.raises(kway.UsageError) as caught:
        build(job_of(Needy))
    assert str(caught.value).startswith("model 'Needy' raised TypeError: ")
    assert str(caught.value).endswith(
        "'width': it is called without arguments; give a function that needs no others, or "
        "functools.partial(Needy, width=..., bias=...)"
    )
    with pytest.raises(
        kway.UsageError, match=r"^init raised TypeError: .*: it is called with 1 argument; .*b=\.\.\."
    ):
        build(job_of(net, init=lambda model, b: model))
    with pytest.raises(
        kway.UsageError, match=r"^init raised TypeError: [^\n]*: it is called with 1 argument$"
    ):
        build(job_of(net, init=lambda: None))
    with pytest.raises(kway.UsageError, match=r"^init raised TypeError: [^\n;]*$"):
        build(job_of(net, init=len))


def test_an_argument_that_is_missing_inside_of_the_user_s_code_shows_its_line():
    with pytest.raises(
        kway.UsageError, match=r"(?s)^Traceback.*in inner\n.*model 'inner' raised TypeError: .*$"
    ) as caught:
        build(job_of(inner))
    assert "in called" not in str(caught.value)
    assert "it is called" not in str(caught.value)


def inner():
    return Needy()


def test_a_factory_that_exits_or_has_no_words_is_an_error_as_any_other():
    class WordlessError(Exception):
        def __str__(self):
            raise ValueError

    def leaves(error):
        raise error

    for error, said in (
        (SystemExit(0), "SystemExit: 0"),
        (WordlessError(), "WordlessError: <exception str.. failed>"),
    ):
        with pytest.raises(kway.UsageError, match=f"raised {said}"):
            build(job_of(partial(leaves, error)))
    with pytest.raises(EndedBySignal):  # a signal that arrives meanwhile is no fault of the factory
        build(job_of(partial(leaves, EndedBySignal(15))))


@pytest.mark.parametrize(
    ("model", "named"),
    [(lambda: 5, "is of type int"), (lambda: nn.Linear, "is of type type"), (nn.ReLU, "no parameters")],
)
def test_what_cannot_be_trained(model, named):
    with pytest.raises(kway.UsageError, match=named):
        build(job_of(model))


def test_files_that_do_not_fit(tmp_path):
    path = tmp_path / "other.safetensors"
    with pytest.raises(kway.UsageError, match=r"other\.safetensors cannot be read"):
        build(job_of(net, init=path))
    path.write_bytes(b"not a weights file")
    with pytest.raises(kway.UsageError, match="cannot be read"):
        build(job_of(net, init=path))
    save_file({"weight": torch.ones(2, 2)}, path)
    with pytest.raises(
        kway.UsageError, match=r"missing bias; not in the model none.*; use the weights of this model"
    ):
        build(job_of(net, init=path))
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, path)
    with pytest.raises(kway.UsageError, match=r"'weight' has shape \(2, 3\): the model has \(2, 2\); build"):
        build(job_of(net, init=path))


def test_an_optimizer_that_is_none():
    job = kway.Job(model=net, loss=nn.MSELoss(), optimizer=lambda parameters: 5, data=torch.ones(2, 2))
    with pytest.raises(kway.UsageError, match=r"is of type int: it must make .*; pass partial"):
        make_optimizer(job, net())


def test_the_last_line_of_a_long_error_is_one_line():
    def talks(parameters):
        raise ValueError("first\nsecond")

    with pytest.raises(kway.UsageError) as caught:
        make_optimizer(replace(job_of(net()), optimizer=talks), net())
    assert str(caught.value).splitlines()[-1] == "the optimizer raised ValueError: first"
    assert "second" in str(caught.value)


def test_an_optimizer_s_function_that_takes_something_else_is_told_what_it_is_called_with():
    def of_a_model(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(kway.UsageError) as caught:
        make_optimizer(replace(job_of(net()), optimizer=of_a_model), net())
    assert "in of_a_model" in str(caught.value)
    last = str(caught.value).splitlines()[-1]
    assert last.startswith(
        "the optimizer raised AttributeError: 'generator' object has no attribute 'parameters': it is called with the "
        "model's named parameters, an iterator of pairs (name, parameter); two groups: named = list(named); return "
    )
    # What is shown works.
    shown = last.partition("two groups: ")[2].replace("; ", "\n    ")
    made = {"torch": torch}
    exec(f"def two_groups(named):\n    {shown}", made)
    groups = make_optimizer(replace(job_of(net()), optimizer=made["two_groups"]), net()).param_groups
    assert [group["weight_decay"] for group in groups] == [0, 0.0]
    assert all(group["params"] for group in groups)


def test_a_factory_of_several_optimizers_is_told_how_two_are_trained():
    both = lambda parameters: [torch.optim.SGD(parameters, lr=0.1)] * 2  # noqa: E731
    with pytest.raises(kway.UsageError, match=r"is of type list: .*; for two optimizers .* two jobs"):
        make_optimizer(replace(job_of(net()), optimizer=both), net())


def test_an_optimizer_of_another_model_s_parameters_is_refused():
    other, own = net(), net()
    job = replace(job_of(own), optimizer=lambda named: torch.optim.SGD([*other.parameters(), own.bias]))
    with pytest.raises(kway.UsageError, match=r"2 of 3 parameters that are not .*; let its factory use the"):
        make_optimizer(job, own)


def test_a_schedule_is_called_with_the_optimizer():
    model = net()
    optimizer = make_optimizer(job_of(model), model)
    assert make_schedule(job_of(model), optimizer) is None
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    made = make_schedule(job_of(model, schedule=step), optimizer)
    assert (made.optimizer, made.step_size) == (optimizer, 2)
    with pytest.raises(
        kway.UsageError, match=r"schedule is of type float: it must make a scheduler .*; pass partial"
    ):
        make_schedule(job_of(model, schedule=lambda optimizer: 0.1), optimizer)
    with pytest.raises(kway.UsageError, match=r"(?s)Traceback.*the schedule raised KeyError: 'lr2'"):
        make_schedule(job_of(model, schedule=lambda optimizer: optimizer.param_groups[0]["lr2"]), optimizer)
