"""Models of text: what they take and give, their sizes, and the same result on several devices."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.data.sources import load
from kway.errors import UsageError
from kway.zoo import get, gpt, usual_data

MODELS = ["gpt", "gpt-1m", "rnn", "rnn-gru", "rnn-lstm"]


@pytest.mark.parametrize("name", MODELS)
def test_each_token_has_scores_of_what_follows(name):
    torch.manual_seed(0)
    model = get(name)((12,), 30)
    tokens = torch.randint(30, (2, 12))
    scores = model(tokens)
    assert scores.shape == (2, 30, 12)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model(tokens[:, :5]).shape == (2, 30, 5)
    # Nothing that comes later is seen.
    later = tokens.clone()
    later[:, 7:] = 0
    torch.testing.assert_close(model(later)[..., :7], scores[..., :7])
    assert not torch.equal(model(later)[..., 7], scores[..., 7])


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name):
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(get(name)((8,), 20).state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("1m", 1_040_768),
        ("10m", 10_795_008),
        ("124m", 124_475_904),
        ("355m", 354_871_296),
        ("774m", 774_090_240),
    ],
)
def test_sizes_of_gpt(size, parameters):
    with torch.device("meta"):
        model = gpt.build((128,), 256, size)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.tokens.weight.shape[0] == (256 if size in {"1m", "10m"} else 50304)


def test_a_size_of_gpt_2_has_its_limits():
    with pytest.raises(UsageError, match="gpt-124m for 1025 positions: at most 1024"):
        get("gpt-124m")((1025,), 256)
    with pytest.raises(UsageError, match="gpt-124m for 50305 tokens: at most 50304"):
        get("gpt-124m")((10,), 50305)


def test_unknown_sizes_and_samples_that_are_no_text_are_said():
    with pytest.raises(UsageError, match=r"model 'gpt' in size '2m': there are gpt-1m, gpt-10m, gpt-124m"):
        get("gpt-2m")
    with pytest.raises(UsageError, match=r"model 'lenet' in size '5': lenet comes in one; lenet alone"):
        get("lenet-5")
    with pytest.raises(UsageError, match=r"unknown model 'gpt-'.*did you mean 'gpt'"):
        get("gpt-")
    with pytest.raises(
        UsageError, match=r"gpt-1m for samples of shape \(1, 28, 28\): \(tokens,\).*--data text"
    ):
        get("gpt")((1, 28, 28), 10)
    with pytest.raises(UsageError, match=r"lenet for samples of shape \(128,\).*--data mnist5k"):
        get("lenet")((128,), 10)
    assert (usual_data("gpt-10m"), usual_data("rnn"), usual_data("lenet")) == ("text", "text", None)


def small(name, rows=40):
    source = load("text")
    build = gpt.GPT if name == "gpt" else get(name)
    made = (
        partial(build, gpt.Config(2, 2, 16))
        if name == "gpt"
        else partial(build, source.shape, source.classes)
    )
    data = source.train.take(torch.arange(rows).numpy())
    length = 16 if name == "gpt" else 6
    return kway.Job(
        made,
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1),
        (data[0][:, :length], data[1][:, :length]),
        batch_size=10,
        precision="fp64",
    )


@pytest.mark.parametrize("name", ["gpt", "rnn"])
@pytest.mark.parametrize("level", ["math", "bits"])
def test_several_devices_give_the_result_of_one(ranks, name, level):
    proof = kway.prove(small(name), devices="cpu:1 cpu:3", exactness=level, steps=2, ranks=ranks)
    assert proof.verdict == "pass", str(proof)
