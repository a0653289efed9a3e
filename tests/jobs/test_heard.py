"""What data or a model raise on one rank while it judges: all ranks hear of it, and a loop that catches it goes on."""

import time
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.jobs import heard
from kway.launch import failure

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(24, 3, generator=DRAW)
Y = torch.randint(2, (24,), generator=DRAW)


class Bad(torch.utils.data.Dataset):
    """Samples of which one cannot be read."""

    def __init__(self, error, place):
        self.error, self.place = error, place

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if index == self.place:
            raise self.error("bad sample")
        return X[index], Y[index]


class Comparing(nn.Module):
    """Communicates in every batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x - kway.all_samples(x).mean(0))


class Fails(nn.Module):
    def forward(self, x):
        if bool((x == X[13]).all(1).any()):
            raise ValueError("a number that it does not like")
        return x


def plain():
    return nn.Linear(3, 2)


def failing():
    return nn.Sequential(Fails(), nn.Linear(3, 2))


JUDGES = {
    "none": lambda p, job: None,
    "own": lambda p, job: p.evaluate(),
    "evaluate": lambda p, job: kway.evaluate(job, p.model, data=job.validation),
    "predict": lambda p, job: kway.predict(job, p.model, data=job.validation),
}


def caught(context, make, data, how):
    """Train, judge after each step and go on; return losses and what was raised."""
    torch.manual_seed(1)
    job = kway.Job(
        model=make, loss=nn.CrossEntropyLoss(), data=(X[:8], Y[:8]), validation=data, batch_size=4,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    losses, raised = [], []
    with kway.parallel(job) as p:
        for batch in p.batches(0):
            losses.append(float(p.step(batch)))
            try:
                JUDGES[how](p, job)
            except Exception as error:
                raised.append(error)
    return losses, [(type(error).__name__, str(error)) for error in raised]


@pytest.mark.parametrize(
    ("make", "place", "how"),
    [
        # The first batch holds samples 0 to 3; the second half of each is rank 1's.
        (plain, 2, "evaluate"),
        (plain, 14, "predict"),
        (plain, 14, "own"),
        (Comparing, 2, "predict"),
        (Comparing, 14, "evaluate"),
        (Comparing, 14, "own"),
    ],
)
def test_a_sample_that_one_rank_cannot_read_is_an_error_on_all_and_the_loop_goes_on(ranks, make, place, how):
    usual = ranks.run(caught, make, (X, Y), "none", limit=30)
    (losses, told), (others, own) = ranks.run(caught, make, Bad(OSError, place), how, limit=30)
    assert losses == others == usual[0][0]
    assert own == [("OSError", "bad sample")] * 2
    assert [name for name, _ in told] == ["RankError"] * 2
    assert all(text.endswith("\nrank 1 failed: OSError: bad sample") for _, text in told)
    assert all("test_heard.py" in text.splitlines()[1] for _, text in told)


def test_a_model_that_fails_on_one_rank_does_so_on_all(ranks):
    (losses, own), (others, told) = ranks.run(caught, failing, (X, Y), "evaluate", limit=30)
    assert losses == others
    # Of the batch of samples 12 to 15 rank 0 holds the first two.
    assert own == [("ValueError", "a number that it does not like")] * 2
    assert [text.splitlines()[-1] for _, text in told] == [
        "rank 0 failed: ValueError: a number that it does not like"
    ] * 2


def test_an_error_of_kway_s_is_the_same_on_all_ranks(ranks):
    (losses, told), (others, own) = ranks.run(caught, plain, Bad(kway.UsageError, 14), "predict", limit=30)
    assert losses == others
    assert told == own == [("UsageError", "bad sample")] * 2


class Own(kway.UsageError):
    """Of the user's, and not to be pickled, nor made of what it says."""

    def __init__(self, text, row=14):
        super().__init__(f"{text} {row}")
        self.show = lambda: row


def test_an_error_that_is_derived_from_kway_s_is_told_in_words(ranks):
    (losses, told), (others, own) = ranks.run(caught, plain, Bad(Own, 14), "predict", limit=30)
    assert losses == others
    assert own == [("Own", "bad sample 14")] * 2
    assert all(name == "RankError" and "bad sample 14" in text for name, text in told)


def mixed(context):
    """Call something else on each rank; return losses and what was raised."""
    torch.manual_seed(1)
    job = kway.Job(
        model=plain, loss=nn.CrossEntropyLoss(), data=(X, Y), validation=(X, Y), batch_size=8,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    losses, how = [], "own" if context.world.rank else "evaluate"
    with kway.parallel(job) as p:
        for batch in p.batches(0):
            losses.append(float(p.step(batch)))
            with pytest.raises(
                kway.MispairedError, match=r"rank 0 called kway.evaluate; rank 1 called p.evaluate"
            ):
                JUDGES[how](p, job)
    return losses


def test_a_loop_that_catches_that_ranks_called_other_things_goes_on(ranks):
    one, other = ranks.run(mixed, limit=30)
    assert one == other
    assert len(one) == 3


def test_the_rank_that_raised_is_blamed_and_not_the_one_that_was_told():
    told_error = kway.RankError(1, 1, "OSError: bad sample", "Traceback ...\nOSError: bad sample")
    first = failure.of_exception(0, told_error)
    later = failure.of_exception(1, OSError("bad sample"))
    assert first.when <= later.when
    assert failure.first([first, later]).rank == 1
    assert first.cause == "kway.errors.RankError: rank 1 failed: OSError: bad sample"


def test_a_rank_that_waits_long_says_what_it_raised(capsys, monkeypatch):
    monkeypatch.setattr(heard, "_SILENT_S", 0.01)
    try:
        Bad(OSError, 3)[3]
    except OSError as error:
        with heard._said_late(1, "kway.evaluate", error):
            time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-2:] == [
        "OSError: bad sample",
        "kway: rank 1 raised this in kway.evaluate, and waits until the other ranks hear of it",
    ]
