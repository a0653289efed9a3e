"""A user's file: transformers' ViT, small; attention drops out; images by keyword, a dict of outputs."""

from functools import partial

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import kway

CONFIG = ViTConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
    num_labels=5, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
)  # fmt: skip


def data():
    draw = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(48, 3, 16, 16, generator=draw), "labels": torch.arange(48) % 5}


def loss(output, target):
    return nn.functional.cross_entropy(output["logits"], target, reduction="none")


job = kway.Job(
    model=lambda: ViTForImageClassification(CONFIG),
    loss=loss,
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    data=data(),
    batch_size=12,
)
