"""The seconds of an epoch, without pauses and saves."""

import time
from functools import partial

import torch
from torch import nn

import kway
from kway.checkpoints import writer
from kway.checkpoints.reading import open_checkpoint
from kway.step.tally import Tally
from kway.training.course import Course

TALLY = Tally([], "cpu")


def test_seconds_are_those_between_pauses_without_stops():
    course = Course(TALLY, seconds=5.0)
    assert course.passed(100.0) == 5.0  # it has not begun
    course.since = 100.0
    course.stops.append(lambda: 0.5)
    assert course.passed(103.0) == 7.5
    course.stops.append(lambda: 0.25)
    course.pause(104.0)
    assert (course.seconds, course.since, course.stops) == (8.25, None, [])
    assert course.passed(1000.0) == 8.25
    course.since = 1000.0
    course.pause(1001.0)
    assert course.seconds == 9.25


def test_a_checkpoint_knows_seconds_without_the_waits_for_saves_before(tmp_path, monkeypatch):
    write = writer.write_checkpoint

    def slowly(folder, frozen):
        time.sleep(0.5)
        return write(folder, frozen)

    monkeypatch.setattr(writer, "write_checkpoint", slowly)
    job = kway.Job(
        model=partial(nn.Linear, 2, 2), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.rand(12, 2), torch.arange(12) % 2), batch_size=2,
    )  # fmt: skip
    run = kway.train(
        job, devices="cpu:1", epochs=1, checkpoint_every="1steps", out=tmp_path / "run", echo=False
    )
    assert run.record.checkpoints["waited_s"] > 2
    samples, seconds, taken = open_checkpoint(tmp_path / "run/checkpoints/step-5").part("run")["course"]
    assert (samples, taken) == (10, 5)
    assert 0 < seconds < 1
    assert 0 < run.record.epochs[0]["seconds"] < 1
