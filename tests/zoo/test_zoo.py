from pathlib import Path

import pytest
import torch
from torch import nn

import kway.zoo
from kway.errors import UsageError
from kway.zoo import get, names, usual_data

OF_IMAGES = [name for name in names() if usual_data(name) is None]


def made(name, shape=(1, 28, 28), classes=10):
    torch.manual_seed(0)
    return get(name)(shape, classes)


def test_models_are_found_by_file():
    files = Path(kway.zoo.__file__).parent.glob("[a-z]*.py")
    assert names() == sorted(path.stem for path in files)


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"'lenett'.*gpt, lenet, mlp, resnet18, rnn.*did you mean 'lenet'"):
        get("lenett")


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (1, 32, 32), (3, 32, 32), (3, 28, 40)])
def test_scores_have_one_row_a_sample(name, shape):
    model = made(name, shape, 7)
    scores = model(torch.rand(2, *shape))
    assert scores.shape == (2, 7)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model(torch.rand(0, *shape)).shape == (0, 7)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_the_seed_decides_the_weights(name):
    one, other = made(name).state_dict(), made(name).state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"), [("lenet", 129068, 8), ("mlp", 235146, 6), ("resnet18", 11175818, 76)]
)
def test_sizes(name, parameters, tensors):
    found = list(made(name).parameters())
    assert (sum(p.numel() for p in found), len(found)) == (parameters, tensors)


def test_names_of_parameters_are_stable():
    assert list(made("lenet").state_dict())[::2] == [
        "conv1.weight",
        "conv2.weight",
        "hidden.weight",
        "output.weight",
    ]
    assert list(made("mlp").state_dict())[::2] == ["hidden1.weight", "hidden2.weight", "output.weight"]
    residual = made("resnet18").state_dict()
    for name in ("stem.0.weight", "stages.1.0.shortcut.bias", "stages.3.1.norm2.running_var", "output.bias"):
        assert name in residual
    assert "stages.0.0.shortcut.weight" not in residual


@pytest.mark.parametrize("name", ["lenet", "resnet18"])
def test_weights_are_normal_with_deviation_one_hundredth(name):
    for module in made(name).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert module.bias is not None
            assert abs(module.weight.mean()) < 5 * 0.01 / module.weight.numel() ** 0.5
            assert abs(module.weight.std() / 0.01 - 1) < 5 / (2 * module.weight.numel()) ** 0.5
            assert (module.bias.abs().max() == 0) == (name == "lenet")


def test_biases_of_resnet18_are_torch_s():
    bias = made("resnet18").stages[3][1].conv2.bias
    limit = (512 * 9) ** -0.5
    assert 0.9 * limit < bias.abs().max() <= limit


def test_lenet_is_the_network_that_its_layers_name():
    model = made("lenet")
    images = torch.rand(3, 1, 28, 28)
    f = nn.functional
    x = f.avg_pool2d(f.relu(f.conv2d(images, model.conv1.weight, model.conv1.bias)), 2)
    x = f.avg_pool2d(f.relu(f.conv2d(x, model.conv2.weight, model.conv2.bias)), 2)
    x = f.relu(f.linear(x.flatten(1), model.hidden.weight, model.hidden.bias))
    expected = f.linear(x, model.output.weight, model.output.bias)
    assert model.hidden.in_features == 800
    assert (model.conv1.out_channels, model.conv2.out_channels) == (20, 50)
    assert (model.conv1.kernel_size, model.conv2.kernel_size) == ((3, 3), (5, 5))
    assert torch.equal(model(images), expected)


def test_resnet18_is_the_network_that_its_layers_name():
    model = made("resnet18", (3, 32, 32)).double().eval()
    x = images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    f = nn.functional
    x = f.relu(model.stem[1](f.conv2d(x, model.stem[0].weight, model.stem[0].bias, padding=1)))
    assert x.shape == (2, 64, 32, 32)
    for stage, (width, side) in zip(model.stages, ((64, 32), (128, 16), (256, 8), (512, 4)), strict=True):
        for block in stage:
            stride = x.shape[2] // side
            y = f.relu(block.norm1(f.conv2d(x, block.conv1.weight, block.conv1.bias, stride, 1)))
            y = block.norm2(f.conv2d(y, block.conv2.weight, block.conv2.bias, padding=1))
            if x.shape[1] != width:
                x = f.conv2d(x, block.shortcut.weight, block.shortcut.bias, stride)
            x = f.relu(x + y)
        assert x.shape == (2, width, side, side)
    expected = f.linear(f.adaptive_avg_pool2d(x, 1).flatten(1), model.output.weight, model.output.bias)
    assert torch.allclose(model(images), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize(("shape", "classes"), [((0, 28, 28), 10), ((28, 28), 10), ((1, 28, 28), 0)])
def test_impossible_shapes_are_refused(name, shape, classes):
    with pytest.raises(UsageError, match=name):
        get(name)(shape, classes)


@pytest.mark.parametrize("side", [13, 5])
def test_lenet_names_the_smallest_image(side):
    with pytest.raises(UsageError, match=f"{side} x 28: at least 14 x 14"):
        get("lenet")((1, side, 28), 10)
    assert made("lenet", (1, 14, 14))(torch.rand(1, 1, 14, 14)).shape == (1, 10)
