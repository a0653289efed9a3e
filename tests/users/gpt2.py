"""A user's file: transformers' GPT-2, small, with random weights; tied embedding, dropout, a mask of padding."""

from functools import partial

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import kway

CONFIG = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)


def data():
    tokens = torch.randint(64, (48, 16), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    # Padding, of another length in each row.
    for row in range(len(labels)):
        labels[row, 16 - row % 5 :] = -100
    return {"input_ids": tokens, "attention_mask": (labels != -100).long(), "labels": labels}


def loss(output, target):
    scores, wanted = output.logits[:, :-1].transpose(1, 2), target[:, 1:]
    losses = nn.functional.cross_entropy(scores, wanted, ignore_index=-100, reduction="sum")
    return losses, (wanted != -100).sum()


job = kway.Job(
    model=lambda: GPT2LMHeadModel(CONFIG),
    loss=loss,
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    data=data(),
    batch_size=12,
)
