"""``kway.evaluate`` and ``kway.predict``: exact and in order, whatever the number of devices."""

import gc
from collections import namedtuple
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import kway

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, -100, 1, 0])
Both = namedtuple("Both", "logits twice")


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        y = self.layer(x)
        return {"logits": y, "both": Both(y, 2 * y), "none": None}


def job_of(model=net, **more):
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return kway.Job(
        **{"model": model, "loss": loss, "optimizer": sgd, "data": (X, Y), "batch_size": 4, **more}
    )


def whole(model):
    model.eval()
    with torch.no_grad():
        return model(X)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 256])
def test_predictions_come_in_the_order_of_the_data_set(spread, size, batch):
    model = net()
    expected = whole(model)
    found = kway.predict(job_of(batch_size=batch), model, devices=f"cpu:{size}")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not found.requires_grad


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("data", [X, X.numpy(), (X,), list(X), {"input": X}])
def test_predictions_need_no_targets(spread, size, data):
    model = net()
    expected = whole(model)
    found = kway.predict(
        job_of(), model, data=[(x,) for x in X] if isinstance(data, list) else data, devices=f"cpu:{size}"
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_predictions_without_targets_where_the_job_names_its_parts(spread):
    model = net()
    job = job_of(data={"image": X, "class": Y}, inputs="image", target="class")
    expected = whole(model)
    for data in ({"image": X}, X):
        torch.testing.assert_close(kway.predict(job, model, data=data, devices="cpu:2"), expected)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_nested_predictions_keep_their_structure(spread, size, micro_batch):
    model = Several()
    expected = whole(model)
    found = kway.predict(job_of(micro_batch=micro_batch), model, devices=f"cpu:{size}")
    assert list(found) == ["logits", "both", "none"]
    assert type(found["both"]) is Both
    assert found["none"] is None
    torch.testing.assert_close(found["both"].twice, expected["both"].twice)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_loss_is_that_of_the_whole_data_set(spread, size):
    model = net().double()
    output = whole_double(model)
    expected = nn.functional.cross_entropy(output, Y, weight=torch.tensor([1.0, 3.0], dtype=torch.float64))
    right = ((output.argmax(1) == Y).double().sum() / 5).item()
    job = job_of(metrics={"accuracy": kway.accuracy}, precision="fp64", batch_size=2)
    found = kway.evaluate(job, model, devices=f"cpu:{size}")
    assert found == pytest.approx({"loss": float(expected), "accuracy": right}, rel=1e-13)


def whole_double(model):
    model.eval()
    with torch.no_grad():
        return model(X.double())


def test_weights_come_from_a_file_a_state_or_a_module(tmp_path):
    model = net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    ways = [model, state, tmp_path / "w.safetensors", str(tmp_path / "w.safetensors")]
    losses = {kway.evaluate(job_of(), way, devices="cpu:1")["loss"] for way in ways}
    assert len(losses) == 1
    assert kway.evaluate(job_of(seed=4), devices="cpu:1")["loss"] not in losses


def test_the_mode_of_a_model_is_given_back():
    model = net().train()
    model[1].eval()
    kway.evaluate(job_of(), model, devices="cpu:1")
    assert [module.training for module in model] == [True, False, True, True]


def test_validation_data_come_first_and_data_may_be_named():
    held = X[:2] * 3, Y[:2]
    model = net()
    on_held = kway.evaluate(job_of(validation=held), model, devices="cpu:1")
    assert on_held == kway.evaluate(job_of(), model, data=held, devices="cpu:1")
    assert on_held != kway.evaluate(job_of(), model, devices="cpu:1")


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (5, "weights of type int"),
        ({"w": torch.ones(1)}, "not in the model w"),
        ("no.safetensors", "cannot be read"),
        ("", "weights='': an empty text names nothing"),
    ],
)
def test_weights_that_do_not_fit(weights, said):
    for judges in (kway.predict, kway.evaluate):
        with pytest.raises(kway.UsageError, match=said):
            judges(job_of(), weights, devices="cpu:1")


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x).sum()


def test_predictions_without_a_row_a_sample_are_an_error():
    with pytest.raises(kway.UsageError, match="first dimension must be the samples"):
        kway.predict(job_of(Summed), devices="cpu:1")


class ByLongest(nn.Module):
    """Outputs as long as the largest number of the batch, as padding to the longest row makes them."""

    def __init__(self, length):
        super().__init__()
        self.layer, self.length = nn.Linear(1, 1), length

    def forward(self, x):
        return {"tags": x.new_zeros(len(x), int(x[:, 0].max()) if self.length is None else self.length, 2)}


@pytest.mark.parametrize("size", [1, 2])
def test_predictions_of_other_shapes_from_batch_to_batch_are_one_error(spread, size):
    x = torch.tensor([[3.0], [7.0], [1.0], [2.0]])
    job = job_of(partial(ByLongest, None), data=(x,), batch_size=2 * size)
    said = r"the output\['tags'\] has shape \(2, 7, 2\) for one batch, \(2, 2, 2\) for another: .*; pad them"
    with pytest.raises(kway.UsageError, match=said):
        kway.predict(job, devices=f"cpu:{size}", data=x)
    fixed = job_of(partial(ByLongest, 8), data=(x,), batch_size=2 * size)
    assert kway.predict(fixed, devices=f"cpu:{size}", data=x)["tags"].shape == (4, 8, 2)


def test_predictions_of_another_structure_from_batch_to_batch_are_one_error():
    from kway.jobs.predictions import merged

    with pytest.raises(
        kway.UsageError, match=r"returned the output\['a'\] for one batch, the output for another"
    ):
        merged([([0], {"a": torch.ones(1)}), ([1], torch.ones(1))])


def test_shapes_that_differ_stop_a_prediction_at_once():
    from kway.jobs.predictions import alike

    taken = []

    def pieces():
        for width in (1, 2, 3):
            taken.append(width)
            yield [0], torch.ones(1, width)

    with pytest.raises(kway.UsageError):
        list(alike(pieces()))
    assert taken == [1, 2]


class OddRow(nn.Module):
    """Longer outputs for the one sample with a large number; counts its batches, so ranks meet after each."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x):
        self.batches += 1
        return self.layer(x).expand(-1, 2 if x.max() > 5 else 1)


def refused_everywhere(context, x):
    import torch.distributed as dist

    try:
        kway.predict(job_of(OddRow, data=(x,), batch_size=4), data=x)
        said = "nothing"
    except kway.UsageError as refused:
        said = str(refused)
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, float(total)


@pytest.mark.parametrize("row", [3, 7])
def test_all_joined_ranks_refuse_what_one_of_them_finds(ranks, row):
    x = torch.ones(12, 1)
    # The last rows of a batch are those of rank 1.
    x[row] = 9
    found = ranks.run(refused_everywhere, x, limit=30)
    assert found[0] == found[1]
    assert "for one batch" in found[0][0]
    assert found[0][1] == 2


class Widening(nn.Module):
    """Another shape for every batch."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).expand(-1, self.calls)


def _raises(output, target):
    raise RuntimeError("of the metric")


@pytest.mark.parametrize(
    ("judge", "model", "more"),
    [(kway.predict, Widening, {}), (kway.evaluate, net, {"metrics": {"bad": _raises}})],
)
def test_a_failure_gives_modes_and_random_state_back_at_once(judge, model, more):
    judged = model().eval()
    state = torch.get_rng_state()
    # The error holds its frames, and with them whatever they left open.
    with pytest.raises((kway.UsageError, RuntimeError), match=r"for one batch|of the metric") as held:
        judge(job_of(batch_size=2, **more), judged, devices="cpu:1")
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in judged.modules())
    torch.manual_seed(5)
    later = torch.get_rng_state()
    del held
    gc.collect()
    assert torch.equal(torch.get_rng_state(), later)
    assert not any(module.training for module in judged.modules())
