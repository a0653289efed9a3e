"""A user's file: transformers' ResNet for images, small, with random weights."""

from functools import partial

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import kway

CONFIG = ResNetConfig(
    num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
)


def data():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(48, 3, 32, 32, generator=draw), torch.randint(5, (48,), generator=draw)


def loss(output, target):
    return nn.functional.cross_entropy(output.logits, target, reduction="none")


job = kway.Job(
    model=lambda: ResNetForImageClassification(CONFIG),
    loss=loss,
    optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    data=data(),
    batch_size=12,
)
