"""Runs of one process draw from one generator: a second one in another thread is refused, one inside is not."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.errors import UsageError
from kway.launch.one_run import check_only_run, only_run

G = torch.Generator().manual_seed(3)
X, Y = torch.randn(26, 6, generator=G), torch.arange(26) % 3
SAID = (
    "a run is going on in another thread of this process: runs of one process draw from one generator, and each would "
    "change the other's numbers; call them one after the other, or use kway.map or processes of their own"
)


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def job(**more):
    sgd = partial(torch.optim.SGD, lr=0.1)
    return kway.Job(net, nn.CrossEntropyLoss(), sgd, data=(X, Y), batch_size=13, **more)


def train(**more):
    return kway.train(job(), **{"devices": "cpu:1", "epochs": 2, "tune": False, "echo": False, **more})


def in_a_thread(act):
    """Call ``act`` in a thread of its own; return what it returned or raised."""
    results = []

    def body():
        try:
            results.append(act())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    return results[0]


def opened():
    with kway.parallel(job(), devices="cpu:1"):
        pass


SECOND = {
    "train": train,
    "prove": lambda: kway.prove(job(), devices="cpu:2"),
    "tune": lambda: kway.tune(job(), devices="cpu:1", seconds=1),
    "plan": lambda: kway.plan(job(), devices="cpu:1"),
    "profile": lambda: kway.profile(job()),
    "parallel": opened,
    "evaluate": lambda: kway.evaluate(job(), devices="cpu:1"),
    "predict": lambda: kway.predict(job(), devices="cpu:1"),
}


def test_a_second_one_in_another_thread_is_refused_before_anything_starts(tmp_path):
    found = {}

    def second(event, record):
        if event == "start":
            calls = {**SECOND, "out": lambda: train(out=tmp_path / "second")}
            found.update({name: in_a_thread(call) for name, call in calls.items()})

    first = train(callbacks=[second])
    assert {name: (type(error), str(error)) for name, error in found.items()} == dict.fromkeys(
        found, (UsageError, SAID)
    )
    assert len(found) == 9
    assert not (tmp_path / "second").exists()
    # It was not disturbed, and the next one is free to begin, wherever it is called.
    assert first.record.weights_sha256 == in_a_thread(train).record.weights_sha256


def test_a_loop_of_ones_own_is_a_run_as_long_as_it_is_open():
    with kway.parallel(job(), devices="cpu:1"):
        assert str(in_a_thread(train)) == SAID
    assert in_a_thread(train).record.steps == 4


@pytest.mark.parametrize("size", [1, 2, "threads"])
def test_one_inside_the_first_goes_on_as_ever(ranks, size):
    inside = []

    def nested(event, record):
        if event == "end":
            inside.append(train().record.weights_sha256)

    given = {"strategy": "threads=2"} if size == "threads" else {"ranks": ranks}
    train(devices=f"cpu:{1 if size == 1 else 2}", callbacks=[nested], **given)
    assert inside == [train().record.weights_sha256]


def test_a_run_that_failed_and_a_thread_that_ended_hold_up_nobody():
    def fails(event, record):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(callbacks=[fails])
    left = []
    in_a_thread(lambda: left.append(kway.parallel(job(), devices="cpu:1")) or left[0].__enter__())
    assert in_a_thread(train).record.steps == 4
    left[0].__exit__(None, None, None)


def test_of_many_at_once_one_goes_on():
    ready, done, found = threading.Barrier(8), threading.Event(), []

    def one():
        ready.wait(20)
        try:
            with only_run():
                found.append("on")
                done.wait(20)
        except UsageError:
            found.append("refused")
        if len(found) == 8:
            done.set()

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1)
    done.set()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == ["on"] + ["refused"] * 7
    check_only_run()


def test_loops_that_end_in_another_order_than_they_began_are_held_to_the_last():
    first, second = kway.parallel(job(), devices="cpu:1"), kway.parallel(job(), devices="cpu:1")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert str(in_a_thread(train)) == SAID
    second.__exit__(None, None, None)
    assert in_a_thread(train).record.steps == 4
