"""A perceptron with two hidden layers."""

from collections import OrderedDict
from math import prod

from torch import nn

from kway.zoo import Shape, check


def build(shape: Shape, classes: int) -> nn.Module:
    """Make a module from images, shape (N, C, H, W), to scores, shape (N, classes); torch's initial weights."""
    check("mlp", shape, classes)
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden1=nn.Linear(prod(shape), 256),
            activation1=nn.ReLU(),
            hidden2=nn.Linear(256, 128),
            activation2=nn.ReLU(),
            output=nn.Linear(128, classes),
        )
    )
