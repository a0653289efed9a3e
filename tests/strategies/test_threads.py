"""Strategy threads: one process, exact as the rest, and what it must not do to the process or to the user's model."""

import os
import random
import signal
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import kway
from kway.comm.reduce import GradientReducer

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(21, 6, generator=G), torch.arange(21) % 3
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def dropped():
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Linear(16, 3))


def job_of(model=plain, **more):
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": SGD, "data": (X, Y), "batch_size": 7, "seed": 3}
    return kway.Job(model=model, **{**given, **more})


def of_process():
    numbers = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    flags = (
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    return numbers, flags, nn.functional.dropout, signal.getsignal(signal.SIGTERM)


def train(job, size=2, **more):
    """Train in threads, and see that the process is what it was, whatever the end."""
    before, count = of_process(), threading.active_count()
    options = {
        "devices": f"cpu:{size}",
        "strategy": "threads",
        "epochs": 2,
        "shards": 3,
        "tune": False,
        **more,
    }
    try:
        return kway.train(job, **options)
    finally:
        assert of_process() == before
        assert "ranks" in more or threading.active_count() == count


class Noisy(torch.utils.data.Dataset):
    """Reads with the random numbers of its process."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + torch.randn(6) * float(np.random.rand()) * random.random(), Y[index]


@pytest.mark.parametrize("level", ["math", "bits", "loose"])
@pytest.mark.parametrize("model", [plain, dropped])
def test_weights_are_those_of_two_processes_to_the_bit(ranks, model, level):
    job = job_of(model, data=Noisy())
    runs = [
        train(job, exactness=level, strategy=name, ranks=ranks, echo=False).record
        for name in ("threads", "data")
    ]
    assert runs[0].weights_sha256 == runs[1].weights_sha256
    assert [(run.strategy, run.devices, run.processes) for run in runs] == [
        ("threads=2", 2, 1),
        ("data=2", 2, 2),
    ]


def test_bits_are_those_of_one_device_on_any_number_of_threads():
    job = job_of(dropped, validation=(X, Y), metrics={"accuracy": kway.accuracy})
    alone = kway.train(job, devices="cpu:1", exactness="bits", epochs=2)
    for size in (2, 3, 5):
        assert (
            train(job, size, exactness="bits", shards=8).record.weights_sha256 == alone.record.weights_sha256
        )


def test_it_says_where_replicas_compute_one_after_the_other():
    assert "one generator" in str(train(job_of(dropped)).record.notices)
    quiet = str(train(job_of()).record.notices)
    assert "one process" in quiet
    assert "one generator" not in quiet


class Counting(nn.Module):
    """Counts its forward passes in a number, a buffer and a list of its own; holds a spectral norm."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.utils.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 3)
        self.passes, self.seen = 0, []
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes += 1
        self.seen.append(threading.current_thread().name)
        self.count += 1
        return self.last(self.first(x))


class Attends(nn.Module):
    """Attention, which is an operation that may draw, with and without dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout, self.last = dropout, nn.Linear(6, 3)

    def forward(self, x):
        rows = x.view(-1, 1, 3, 2)
        found = nn.functional.scaled_dot_product_attention(
            rows, rows, rows, dropout_p=self.dropout if self.training else 0.0
        )
        return self.last(found.reshape(-1, 6))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_takes_turns_only_where_it_drops_something(ranks, dropout):
    run = train(job_of(partial(Attends, dropout)))
    assert ("one after the other" in str(run.record.notices)) == (dropout > 0)
    expected = kway.train(
        job_of(partial(Attends, dropout)), devices="cpu:2", epochs=2, tune=False, ranks=ranks
    )
    assert run.record.weights_sha256 == expected.record.weights_sha256


def test_attributes_stay_and_hooks_run_once_a_pass():
    calls = []
    model = Counting()
    model.last.register_forward_hook(lambda module, args, out: calls.append(id(module)))
    run = train(job_of(model), epochs=1, steps=3)
    assert run.model is model
    assert (model.passes, int(model.count)) == (3, 3)
    assert set(model.seen) == {"kway-rank-0"}
    # The other replica's hook appends to a list of its own.
    assert calls == [id(model.last)] * 3
    # A vector that each pass refines, and that all replicas hold alike.
    first, second = (kway.train(job_of(Counting), devices="cpu:1", epochs=1).model,
                     train(job_of(Counting), epochs=1).model)  # fmt: skip
    assert torch.allclose(first.first.weight_u, second.first.weight_u, atol=1e-5)


class Wrong(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 11:
            raise ZeroDivisionError("sample 11")
        return X[index], Y[index]


def test_what_one_replica_raises_ends_the_run_as_it_is():
    with pytest.raises(ZeroDivisionError, match="sample 11"):
        train(job_of(data=Wrong(), workers=0))


class Branching(nn.Module):
    """Normalises large shares only, from its step ``first`` on, with no layer after it that would tell."""

    def __init__(self, first):
        super().__init__()
        self.norm, self.last, self.steps, self.first = nn.BatchNorm1d(6), nn.Linear(6, 3), 0, first

    def forward(self, x):
        self.steps += 1
        return self.last(self.norm(x) if len(x) > 3 or self.steps < self.first else x)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("first", "said"),
    [
        (1, "in all-gather .* in all-reduce|in all-reduce .* in all-gather"),
        (2, "rank 0 waits in .*, rank 1 waits in .* of series /1"),
    ],
)
def test_a_layer_that_only_one_replica_comes_to_ends_the_run(first, said):
    with pytest.raises(kway.MispairedError, match=said):
        train(job_of(partial(Branching, first)))


class Routed(nn.Module):
    """Two heads; the last layer of all normalises, and shares without a sample of its kind do not reach it."""

    def __init__(self):
        super().__init__()
        self.trunk, self.usual = nn.Linear(6, 4), nn.Linear(4, 4)
        self.rare = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        hidden = self.trunk(x)
        return self.usual(hidden), self.rare(hidden)


def routed(output, target):
    rare = target > 0
    total = (output[0] - 1).square()[~rare].sum()
    if rare.any():
        total = total + (output[1] - 1).square()[rare].sum()
    return total, len(target)


def test_nothing_is_sent_ahead_of_layers_that_communicate_in_backward():
    # Both kinds are in each share for four steps; then the first one has none of the second.
    target = torch.tensor([1, 0] * 8 + [0, 0, 1, 1])
    job = job_of(Routed, loss=routed, data=(X[:20], target), batch_size=4, shuffle=False, precision="fp64")
    alone = kway.train(job, devices="cpu:1", epochs=1).model.state_dict()
    run = train(job, epochs=1, settings={"bucket_mib": 1e-5})
    for name, value in alone.items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(("model", "ahead"), [(plain, 0), (dropped, 2)])
def test_gradients_are_sent_ahead_where_nothing_else_communicates(monkeypatch, model, ahead):
    ranks, real = [], GradientReducer.sending
    monkeypatch.setattr(
        GradientReducer, "sending", lambda self: (ranks.append(self.group.rank), real(self))[1]
    )
    train(job_of(model), epochs=1, settings={"bucket_mib": 1e-5})
    # Of three steps the first one finds out.
    assert [ranks.count(rank) for rank in (0, 1)] == [ahead, ahead]


class Late(nn.Module):
    """Draws from its third pass on."""

    def __init__(self):
        super().__init__()
        self.last, self.passes = nn.Linear(6, 3), 0

    def forward(self, x):
        self.passes += 1
        return nn.functional.dropout(self.last(x), 0.5 if self.passes > 2 else 0.0)


def test_draws_that_begin_later_are_refused_and_not_mixed_up():
    with pytest.raises(kway.RefusedError, match="one generator"):
        train(job_of(Late))


class Put(nn.Module):
    """Draws from a generator that it puts back, so that it looks untouched."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(x))
            return self.last(x + torch.randn(6))


def test_draws_that_leave_no_trace_are_seen_too():
    assert "one generator" in str(train(job_of(Put)).record.notices)


def raising(number):
    def listen(event, record):
        if event == "step":
            os.kill(os.getpid(), number)

    return listen


def test_ctrl_c_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        train(job_of(), epochs=10_000, log_every=1, callbacks=[raising(signal.SIGINT)])


def test_a_wish_to_stop_leaves_a_checkpoint_from_which_any_strategy_goes_on(ranks, tmp_path):
    job = job_of(dropped)
    options = {"exactness": "bits", "checkpoint_every": "100steps", "epochs": 4}
    with pytest.raises(kway.StoppedError):
        train(job, out=tmp_path / "a", log_every=1, callbacks=[raising(signal.SIGTERM)], **options)
    whole = kway.train(job, devices="cpu:1", exactness="bits", epochs=4, shards=3).record.weights_sha256
    more = {"resume": tmp_path / "a", "ranks": ranks, "echo": False, **options, "checkpoint_every": None}
    for name in ("data", "threads"):
        run = train(job, strategy=name, **more)
        assert run.record.weights_sha256 == whole
        assert run.record.resumed_from_step


def test_it_goes_on_from_a_checkpoint_of_one_device(tmp_path):
    job = job_of()
    kway.train(
        job, devices="cpu:1", epochs=1, out=tmp_path / "a", checkpoint_every=1, exactness="bits", shards=2
    )
    run = train(job, resume=tmp_path / "a", exactness="bits", shards=2)
    whole = kway.train(job, devices="cpu:1", epochs=2, exactness="bits", shards=2)
    assert run.record.weights_sha256 == whole.record.weights_sha256


def test_predictions_keep_their_order_and_evaluation_counts_each_sample_once():
    job = job_of(plain(), metrics={"accuracy": kway.accuracy})
    where = {"devices": "cpu:3", "strategy": "threads"}
    assert torch.allclose(kway.predict(job, **where), kway.predict(job, devices="cpu:1"), atol=1e-6)
    assert kway.evaluate(job, **where) == pytest.approx(kway.evaluate(job, devices="cpu:1"))


class Stream(torch.utils.data.IterableDataset):
    """Counts in itself how far it was read."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        for self.at in range(21):
            yield X[self.at], Y[self.at]


def test_streams_and_generators_are_each_replicas_own():
    sampler = torch.utils.data.RandomSampler(range(21), generator=torch.Generator().manual_seed(4))
    shuffled = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, Y), batch_size=8, sampler=sampler, num_workers=0
    )
    for data in (Stream(), shuffled):
        own = [job_of(data=data, precision="fp64", optimizer=SGD) for _ in range(2)]
        start = sampler.generator.get_state()
        alone = kway.train(own[0], devices="cpu:1", epochs=1).record.epochs[0]["train_loss"]
        sampler.generator.set_state(start)
        assert train(own[1], epochs=1).record.epochs[0]["train_loss"] == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_restarts": 1}, "max_restarts"),
        ({"stall_timeout": "5s"}, "stall_timeout"),
        ({"on_oom": "adapt"}, "on_oom"),
        ({"tune_seconds": 2}, "tune_seconds"),
        ({"timeline": 5}, "one profiler"),
        ({"step_kind": "compiled"}, "several threads"),
        ({"strategy": "threads=2:data=1"}, "one process"),
    ],
)
def test_what_needs_processes_is_refused(more, said):
    with pytest.raises(kway.UsageError, match=said):
        train(job_of(), **more)


def test_loops_of_ones_own_and_tuning_are_refused():
    where = {"devices": "cpu:2", "strategy": "threads"}
    with pytest.raises(kway.UsageError, match="one thread"), kway.parallel(job_of(), **where):
        pass
    with pytest.raises(kway.UsageError, match="eager"):
        kway.tune(job_of(), **where)


def test_a_model_that_cannot_be_copied_is_refused():
    model = plain()
    model.lock = threading.Lock()
    with pytest.raises(kway.RefusedError, match="cannot be copied"):
        train(job_of(model))


def test_a_stream_that_cannot_be_copied_is_named(tmp_path):
    class Lines(IterableDataset):
        def __init__(self):
            self.file = (tmp_path / "lines").open("w+")

        def __iter__(self):
            yield from ((X[i], Y[i]) for i in range(len(X)))

    said = r"strategy threads with data of type Lines that cannot be copied .*: every replica reads a stream of its own"
    for data in (Lines(), DataLoader(Lines(), batch_size=4)):
        with pytest.raises(kway.RefusedError, match=said):
            train(replace(job_of(), data=data, batch_size=None if isinstance(data, DataLoader) else 7))
        (data if isinstance(data, Lines) else data.dataset).file.close()


def test_a_scripted_model_has_replicas_that_train():
    job = job_of(precision="fp64")
    scripted = replace(
        job, model=lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    )
    alone = kway.train(scripted, devices="cpu:1", epochs=2).record.epochs[-1]["train_loss"]
    assert train(scripted).record.epochs[-1]["train_loss"] == pytest.approx(alone, abs=1e-12)
