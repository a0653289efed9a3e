"""Level bits on 1 to 4 GPUs: each count has the bits of one GPU, and that one has those of plain torch's loop."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.comm import tree
from kway.zoo import get

# The first on a machine loads kernels for each shape in four processes, which can take two minutes.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SHARDS, BATCH, STEPS, WORDS, LENGTH = 4, 19, 4, 50, 16


class Decoder(nn.Module):
    """Predicts the next of a few words: attention with dropout, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        places = self.places(torch.arange(length, device=tokens.device))
        return self.head(self.layers(self.words(tokens) + places, mask=mask, is_causal=True))


def words_loss(output, target):
    """Sum over words and their number: cross entropy over two dimensions has no deterministic kernel."""
    each = nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="none")
    return each.sum(), each.new_tensor(float(each.numel()))


def job(model, precision):
    draw = torch.Generator().manual_seed(3)
    shared = {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9), "batch_size": BATCH}
    if model == "decoder":
        tokens = torch.randint(WORDS, (3 * BATCH, LENGTH + 1), generator=draw)
        return kway.Job(
            model=Decoder,
            loss=words_loss,
            data=(tokens[:, :-1], tokens[:, 1:]),
            precision=precision,
            **shared,
        )
    images = torch.rand(3 * BATCH, 1, 28, 28, generator=draw)
    return kway.Job(
        model=partial(get(model), (1, 28, 28), 10),
        loss=nn.CrossEntropyLoss(),
        data=(images, torch.randint(10, (3 * BATCH,), generator=draw)),
        precision=precision,
        **shared,
    )


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("model", ["lenet", "resnet18", "decoder"])
def test_any_number_of_gpus_has_the_bits_of_one(up_to_four, model, precision):
    ranks, devices = up_to_four
    proof = kway.prove(
        job(model, precision),
        devices=devices,
        exactness="bits",
        shards=SHARDS,
        steps=STEPS,
        precision=precision,
        ranks=ranks,
    )
    rows = [(row["devices"], row["equal"], row["reason"]) for row in proof.candidates]
    anchor = {
        key: proof.reference["anchor"][key] for key in ("equal", "reason", "first_difference", "max_ulps")
    }
    print(model, precision, rows, anchor)
    assert proof.verdict == "pass", (rows, [row["first_difference"] for row in proof.candidates])
    assert [row[:2] for row in rows] == [(k, "bits") for k in range(1, len(rows) + 1)]


def mischief(model):
    """Make the model, and on several ranks sum the shards one after the other instead of in a tree."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        tree.halves = lambda span: ((span[0], span[0] + 1), (span[0] + 1, span[1]))
    return get(model)((1, 28, 28), 10)


def test_shards_summed_in_another_order_fail(two):
    """Ranks of their own, which end with the test: theirs is the broken tree."""
    given = replace(job("lenet", "fp32"), model=partial(mischief, "lenet"))
    proof = kway.prove(
        given, devices=f"cuda:0 {two}", exactness="bits", shards=SHARDS, steps=STEPS, precision="fp32"
    )
    assert proof.verdict == "fail"
    assert [row["equal"] for row in proof.candidates] == ["bits", "no"]
    assert proof.candidates[1]["first_difference"]["step"] == 1
