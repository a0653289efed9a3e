"""What is said where a collate function pads each part of a batch to its own longest sample."""

import io
from contextlib import redirect_stderr
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import kway

SAID = "the collate function gave samples of shape"


class Lines(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.arange(1.0, 2 + (5 * index) % 7), index % 2


def to_the_longest(rows):
    return pad_sequence([row for row, _ in rows], batch_first=True), torch.tensor(
        [label for _, label in rows]
    )


def to_seven(rows):
    lines, labels = to_the_longest([*rows, (torch.zeros(7), 0)])
    return lines[:-1], labels[:-1]


class Mean(nn.Module):
    """Takes the mean over all positions, padding too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x):
        return self.layer(x[..., None]).tanh().mean(1)


def lines(collate=to_the_longest):
    return DataLoader(Lines(), batch_size=5, collate_fn=collate)


def job_of(**more):
    sgd = partial(torch.optim.SGD, lr=0.1)
    more = {"data": lines(), "precision": "fp64", "optimizer": sgd, **more}
    return kway.Job(model=Mean, loss=nn.CrossEntropyLoss(), **more)


def train(ranks, job, size):
    found = kway.train(job, devices=f"cpu:{size}", ranks=ranks, echo=False, epochs=2)
    return found, sum(SAID in line for line in found.record.notices)


def test_training_says_so_once(ranks):
    alone, said = train(ranks, job_of(), 1)
    assert said == 0
    spread, said = train(ranks, job_of(validation=lines()), 2)
    assert said == 1
    # What it is said for.
    assert abs(alone.epochs[0]["train_loss"] - spread.epochs[0]["train_loss"]) > 1e-6
    assert train(ranks, job_of(micro_batch=2), 1)[1] == 1
    assert train(ranks, job_of(data=lines(to_seven), micro_batch=2), 2)[1] == 0
    assert train(ranks, job_of(data=lines(to_seven), validation=lines()), 2)[1] == 1


def judged(context, call, collate):
    with redirect_stderr(io.StringIO()) as said:
        call(job_of(), data=lines(collate))
    return said.getvalue().count(SAID)


@pytest.mark.parametrize("call", [kway.evaluate, kway.predict])
def test_evaluation_and_prediction_say_so(ranks, call):
    assert ranks.run(judged, call, to_the_longest, size=2) == [1, 0]
    assert ranks.run(judged, call, to_seven, size=2) == [0, 0]


def loop(context, collate, ends, folder):
    said = io.StringIO()
    with redirect_stderr(said), kway.parallel(job_of(data=lines(collate), validation=lines(collate))) as p:
        for epoch in range(2):
            for batch in p.batches(epoch):
                p.step(batch)
            {"evaluate": p.evaluate, "save": partial(p.save, folder), "none": p.barrier}[ends]()
    return said.getvalue().count(SAID)


@pytest.mark.parametrize("ends", ["evaluate", "save"])
def test_a_loop_of_ones_own_says_so_once_where_ranks_meet(ranks, ends, tmp_path):
    assert ranks.run(loop, to_the_longest, ends, tmp_path, size=2) == [1, 0]
    assert ranks.run(loop, to_seven, ends, tmp_path, size=2) == [0, 0]
    assert ranks.run(loop, to_the_longest, "none", tmp_path, size=2) == [0, 0]


def test_a_proof_that_fails_names_it_as_a_possible_cause(ranks):
    def proved(**more):
        return kway.prove(job_of(**more), devices="1,2", steps=1, ranks=ranks, echo=False)

    wrong = proved(optimizer=torch.optim.Adam)
    assert wrong.verdict == "fail"
    # Before all that is beside the point.
    assert wrong.notices[0].startswith(f"a possible cause of what differs: {SAID}")
    assert len(wrong.notices) > 1
    right = proved(data=lines(to_seven))
    assert right.verdict == "pass"
    assert SAID not in str(right)


def test_at_bits_nothing_follows_the_number_of_devices_and_nothing_is_said(ranks):
    found = [
        kway.train(
            job_of(), devices=f"cpu:{size}", exactness="bits", shards=4, ranks=ranks, echo=False, epochs=1
        )
        for size in (1, 2)
    ]
    assert found[0].record.weights_sha256 == found[1].record.weights_sha256
    assert not any(SAID in line for run in found for line in run.record.notices)
