"""Layouts as text and data, and what is refused before anything runs."""

from dataclasses import replace
from functools import partial, wraps

import pytest
import torch
from torch import nn

import kway
from kway.errors import UsageError
from kway.step.build import check_optimizer, make_optimizer
from kway.strategies.layout import check_model, fit, named_sizes, title


@pytest.mark.parametrize(
    ("text", "devices", "layout"),
    [
        ("single", 1, {}),
        ("data", 1, {"data": 1}),
        ("data", 3, {"data": 3}),
        ("ddp", 2, {"data": 2}),
        ("data=4", 4, {"data": 4}),
        (" ddp=2 ", 2, {"data": 2}),
    ],
)
def test_what_a_text_means(text, devices, layout):
    assert fit(text, devices) == layout
    assert fit(title(layout), devices) == layout


@pytest.mark.parametrize(
    ("text", "devices", "said"),
    [
        ("dat", 2, r"data"),
        ("data=0", 2, "at least 1"),
        ("data=-1", 2, "at least 1"),
        ("data=two", 2, "at least 1"),
        ("data=2:data=2", 4, "named twice"),
        ("data:ddp", 4, "named twice"),
        ("data=2", 3, "it needs 2"),
        ("data=4", 2, "it needs 4"),
        ("single", 2, "it needs 1"),
        ("", 1, "data"),
        ("auto", 2, "a layout is named here, and none is chosen; use one of single, data, threads"),
        ("data=2:", 2, "data"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(text, devices, said):
    with pytest.raises(kway.UsageError, match=said):
        fit(text, devices)


@pytest.mark.parametrize(("kind", "advice"), [("cpu", "--devices cpu:4,"), ("cuda", "--devices 4,")])
def test_as_many_devices_as_fit_are_advised_of_the_type_that_was_meant(kind, advice):
    with pytest.raises(kway.UsageError, match=advice):
        fit("data=4", 2, kind)


def test_names_that_are_read_as_others_are_not_listed():
    with pytest.raises(UsageError, match=r"known are auto, data, single, threads$"):
        fit("sideways", 2)


def test_names_without_sizes_are_left_open():
    assert named_sizes("data") == [("data", None)]
    assert named_sizes("single") == []


def job_of(**more):
    data = torch.ones(8, 3), torch.ones(8, 3)
    return kway.Job(
        model=nn.Linear(3, 3),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        **more,
    )


class FSDPModule(nn.Linear):
    """Named like what torch makes of a model that it has sharded."""


@pytest.mark.parametrize("model", [nn.DataParallel(nn.Linear(3, 3)), FSDPModule(3, 3)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_is_wrapped_already_is_refused(model, inside):
    name = type(model).__name__
    model = nn.Sequential(model) if inside else model
    with pytest.raises(kway.RefusedError, match=name) as caught:
        check_model(job_of(), model, {"data": 2}, "math", 8)
    assert ("'0'" if inside else "itself") in str(caught.value)
    assert ".module" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"), [(partial(nn.LazyLinear, 3), "1.weight"), (nn.LazyBatchNorm1d, "1.weight")]
)
@pytest.mark.parametrize("layout", [{}, {"data": 2}])
def test_a_model_that_has_no_shapes_yet_is_refused(kind, name, layout):
    model = nn.Sequential(nn.Linear(3, 3), kind())
    with pytest.raises(kway.RefusedError, match=rf"'{name}'.*run one batch through the model first"):
        check_model(job_of(), model, layout, "math", 8)
    model(torch.ones(8, 3))
    check_model(job_of(), model, layout, "math", 8)


def test_synchronised_normalisation_cut_in_time_is_refused_at_loose():
    model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    with pytest.raises(kway.RefusedError, match=r"micro_batch=2 .*SyncBatchNorm.*'1'"):
        check_model(job_of(micro_batch=2), model, {"data": 2}, "loose", 8)
    check_model(job_of(micro_batch=4), model, {"data": 2}, "loose", 8)
    check_model(job_of(micro_batch=2), model, {"data": 1}, "loose", 8)


def test_normalisation_cut_in_time_is_refused_with_the_numbers():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(kway.RefusedError, match=r"micro_batch=2 .*'1'.*up to 4 samples"):
        check_model(job_of(micro_batch=2), model, {"data": 2}, "math", 8)
    check_model(job_of(micro_batch=4), model, {"data": 2}, "math", 8)
    check_model(job_of(micro_batch=2), model, {"data": 2}, "loose", 8)
    check_model(job_of(micro_batch=2), nn.Linear(3, 3), {"data": 2}, "math", 8)


def factory(parameters):
    return torch.optim.LBFGS([p for _, p in parameters])


class Wrapped(torch.optim.SGD):
    def step(self, *args, **options):
        return super().step(*args, **options)


NEEDS_A_CLOSURE = r"LBFGS, whose step\(\) asks for closure.*like SGD"


def job_with(optimizer):
    return kway.Job(
        model=nn.Linear(2, 2), loss=nn.MSELoss(), optimizer=optimizer, data=[(1, 2)], batch_size=4
    )


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, partial(partial(torch.optim.LBFGS, lr=0.5))])
def test_a_class_of_optimizers_that_asks_for_a_closure_is_refused(optimizer):
    job = job_with(optimizer)
    with pytest.raises(UsageError, match=NEEDS_A_CLOSURE):
        check_model(job, job.model, {"data": 2}, "math", 4)


def test_an_optimizer_that_a_function_makes_is_refused_where_it_is_made():
    job = job_with(factory)
    with pytest.raises(UsageError, match=NEEDS_A_CLOSURE):
        make_optimizer(job, job.model)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Wrapped, torch.optim.AdamW, torch.optim.Rprop])
def test_an_optimizer_that_can_do_without_a_closure_is_taken(optimizer):
    check_optimizer(optimizer)


def injecting(function):
    @wraps(function)
    def call(optimizer):
        return function(optimizer, 2)

    return call


@injecting
def decorated(optimizer, step_size):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size)


StepLR = torch.optim.lr_scheduler.StepLR


@pytest.mark.parametrize("changed", [{"schedule": StepLR}, {"optimizer": lambda named, rate: named}])
def test_a_factory_that_needs_more_is_refused_before_it_is_called(changed):
    job = replace(job_with(torch.optim.SGD), **changed)
    with pytest.raises(
        UsageError, match=r"cannot be called as it is: .* 1 argument; .*, (step_size|rate)=\.\.\."
    ):
        check_model(job, job.model, {"data": 2}, "math", 4)


@pytest.mark.parametrize(
    "schedule", [None, partial(StepLR, step_size=2), decorated, lambda *all_of_them: all_of_them]
)
def test_a_schedule_that_can_be_called_is_taken(schedule):
    job = replace(job_with(torch.optim.SGD), schedule=schedule)
    check_model(job, job.model, {"data": 2}, "math", 4)
