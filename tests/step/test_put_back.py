"""A module that was moved or cast has its own tensors in its own memory afterwards, with the values of the time."""

from functools import partial

import pytest
import torch
from tests.step.recorded import Net, opened, share
from torch import nn

import kway
from kway.step.put_back import put_back


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def trained():
    model = Net()
    model(torch.randn(6, 3)).sum().backward()
    return model


def test_a_cast_is_undone_in_the_memory_of_before():
    model = trained()
    grads = [p.grad for p in model.parameters()]
    everything = [*tensors(model), *grads]
    before = [(t, t.data_ptr(), t.dtype, t.detach().clone()) for t in everything]
    with put_back(model):
        model.to(torch.bfloat16)
        assert model.inner[0].weight.grad.dtype == torch.bfloat16
    after = [*tensors(model), *(p.grad for p in model.parameters())]
    for now, (was, address, dtype, value) in zip(after, before, strict=True):
        assert now is was
        assert (now.data_ptr(), now.dtype) == (address, dtype)
        assert torch.equal(now, value)


@pytest.mark.parametrize("flag", ["overwrite", "swap"])
def test_a_cast_is_undone_however_torch_casts(flag):
    model = Net()
    before = tensors(model)
    values = [tensor.detach().clone() for tensor in before]
    setting = getattr(torch.__future__, f"set_{flag}_module_params_on_conversion")
    setting(True)
    try:
        with put_back(model):
            model.double()
    finally:
        setting(False)
    for now, was, value in zip(tensors(model), before, values, strict=True):
        assert now is was
        assert now.dtype == value.dtype
        assert torch.equal(now, value)


def test_what_changed_inside_stays_changed():
    model = Net()
    mean, weight = model.inner[1].running_mean, model.inner[0].weight
    with put_back(model):
        model.double()
        model.inner[1].running_mean += 1
        with torch.no_grad():
            model.inner[0].weight.zero_()
    assert model.inner[1].running_mean is mean
    assert mean.tolist() == [1.0] * 4
    assert not weight.any()
    assert model.inner[0].weight is weight


def test_what_stays_where_it_is_may_be_replaced():
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(1))
    model.register_buffer("ids", torch.zeros(1, dtype=torch.int64))
    with put_back(model):
        model.double()
        model.table = torch.ones(3, dtype=torch.float64)
        model.ids = torch.ones(4, dtype=torch.int64)
        model.register_buffer("made", torch.ones(2, dtype=torch.float64))
        del model.bias
    assert (model.table.dtype, len(model.table)) == (torch.float32, 3)
    assert (model.ids.dtype, len(model.ids)) == (torch.int64, 4)
    assert len(model.made) == 2


def test_another_device_is_left_with_what_was_made_there():
    with torch.device("meta"):
        model = Net()
    before = tensors(model)
    with put_back(model):
        model.to_empty(device="cpu")
        model.register_buffer("made", torch.ones(2))
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    found.pop("made")
    assert all(now is was for now, was in zip(found.values(), before, strict=True))
    assert all(tensor.is_meta for tensor in tensors(model))
    assert len(tensors(model)) == len(before) + 1


def test_a_failure_puts_back_as_well():
    model = Net()

    def fails():
        with put_back(model):
            model.double()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("given", ["as weights", "as the job's model"])
@pytest.mark.parametrize("judge", [kway.evaluate, kway.predict])
def test_an_open_job_goes_on_in_its_recorded_steps_when_its_module_was_judged(judge, given):
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    engine, graphed, recorder = opened(Net(), optimizer=sgd)
    plain, *_ = opened(Net(), optimizer=sgd)
    x, y = share(0).micro[0][0]
    # The precision moves it to other memory, as another device would.
    other = kway.Job(
        model=engine.model if given == "as the job's model" else Net,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        data=(x, y),
        batch_size=6,
        precision="fp64",
    )
    for step in range(8):
        graphed.run(share(step), step)
        plain._step.run(share(step), step)
        if step == 5:
            judge(other, engine.model if given == "as weights" else None, devices="cpu:1")
    assert [made.closed for made in recorder.made] == [False]
    assert recorder.made[0].replays == 5
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value)
