"""What is counted where memory runs out, what counts as that, and what is said."""

import gc
import weakref
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import kway
from kway.data.share import Share
from kway.errors import OutOfMemoryError
from kway.step.exhausted import asked_for, is_exhaustion, is_of_host, line_of_user, phase_of
from kway.step.holdings import Holdings
from kway.step.memory_advice import Situation, advice
from kway.step.out_of_memory import Memory
from kway.step.room import Room

CPU = torch.device("cpu")
FULL = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.19 GiB of which"
GIB = 1 << 30


def allocated(size):
    """What torch raises where a CPU has no room."""
    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("there was room")


def test_what_says_that_memory_ran_out():
    real = allocated(2**62)
    assert is_exhaustion(real)
    assert is_of_host(real)
    assert asked_for(real) == 2**62
    full = torch.OutOfMemoryError(FULL)
    assert is_exhaustion(full)
    assert not is_of_host(full)
    assert asked_for(full) == 5 * GIB // 2
    assert is_of_host(MemoryError("Unable to allocate 3.00 MiB for an array with shape (3,)"))
    assert asked_for(MemoryError("Unable to allocate 3.00 MiB for an array")) == 3 << 20
    assert is_exhaustion(torch.AcceleratorError("CUDA error: out of memory"))
    assert asked_for(MemoryError()) is None


def test_words_of_others_say_nothing():
    class MineError(RuntimeError):
        pass

    for error in (RuntimeError("out of memory"), ValueError(FULL), MineError("CUDA error: out of memory")):
        assert not is_exhaustion(error)


def test_each_piece_of_memory_counts_once_and_for_the_first_part_that_names_it():
    whole = torch.zeros(100)
    held = Holdings(CPU)
    held.add("weights", whole[:10])
    held.add("gradients", [whole.view(10, 10), {"a": deque([torch.zeros(3, dtype=torch.float64)])}])
    assert held.bytes == {"weights": 400, "gradients": 24}
    rows = np.zeros((4, 5))
    held.add("input", rows[2:], torch.from_numpy(rows), torch.zeros(7, device="meta"))
    assert held.bytes["input"] == 160
    table = torch.sparse_coo_tensor(torch.tensor([[1, 5]]), torch.zeros(2, 3), (9, 3), check_invariants=True)
    held.add("sparse", table)
    assert held.bytes["sparse"] == 2 * 8 + 6 * 4
    assert held.total == 400 + 24 + 160 + 40


def test_what_a_generator_has_read_ahead_is_found():
    def reads():
        ahead = [torch.zeros(5)]
        yield
        yield ahead

    reading = reads()
    next(reading)
    held = Holdings(CPU)
    held.add("input", reading)
    assert held.bytes == {"input": 20}


def test_what_a_step_was_at_is_read_off_the_traceback():
    def raised(*through):
        """Raise from inside of functions, which look like those of a step."""
        code = "def call(next, *rest):\n    next(*rest) if rest else next()"
        places = {}
        for name in through:
            exec(code, found := {"__name__": name})
            places[name] = found["call"]
        try:
            chain(*(places[name] for name in through), fails)
        except torch.OutOfMemoryError as error:
            return error
        raise AssertionError("nothing was raised")

    def chain(first, *rest):
        first(*rest) if rest else first()

    def fails():
        raise torch.OutOfMemoryError(FULL)

    assert phase_of(raised("kway.comm.flat")) == "reduction"
    assert phase_of(raised("kway.step.share")) == "step"
    assert line_of_user(raised("kway.comm.flat")).startswith("test_out_of_memory.py:")


def memory_of(**more):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    job = kway.Job(model=model, loss=None, optimizer=torch.optim.SGD, data=None, **more)
    return Memory(job, model, CPU, rank=1), model


def share(count=6, pieces=2):
    micro = [(torch.zeros(count // pieces, 3), count // pieces) for _ in range(pieces)]
    return Share(micro, count, 2 * count, 0, 4, np.arange(count))


def told(memory, error, doing="step", what=None):
    def fails():
        kept = torch.zeros(1000)
        gone.append(weakref.ref(kept))
        raise error

    gone = []
    with pytest.raises(OutOfMemoryError) as caught, memory.explains(doing, what or share()):
        fails()
    gc.collect()
    assert gone[0]() is None, "what failed still holds its tensors"
    assert caught.value.__cause__ is error
    return caught.value


def test_the_parts_are_those_that_are_there():
    memory, model = memory_of()
    optimizer = torch.optim.Adam(model.parameters())
    memory.held_by(optimizer)
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()
    error = told(memory, allocated(2**62))
    weights = 4 * (12 + 4 + 4 + 4)
    assert {name: error.memory[name] for name in ("weights", "gradients", "buffers", "input", "asked")} == {
        "weights": weights,
        "gradients": weights,
        # Two statistics and a counter.
        "buffers": 4 * 8 + 8,
        # With the indices of its samples.
        "input": 6 * 3 * 4 + 6 * 8,
        "asked": 2**62,
    }
    # Two moments a weight, and a number of steps for each of 4 tensors.
    assert error.memory["optimizer state"] == 2 * weights + 4 * 4
    assert 0 < error.memory["free"] <= error.memory["total"]
    assert (error.rank, error.device, error.samples) == (1, "cpu", 3)
    text = str(error)
    assert text.startswith("rank 1 (cpu) ran out of memory in epoch 1, step 5 (step, test_out_of_memory.py:")
    assert "3 samples at once of a global batch of 12" in text
    assert "4096.0 PiB were asked for" in text
    assert "optimizer state" in text
    assert "micro_batch=1 (--micro-batch 1)" in text


def test_activations_are_the_measured_peak_less_the_rest_and_tell_what_fits(monkeypatch):
    memory, _ = memory_of()
    memory._device = torch.device("cuda:0")
    room = Room(80 * GIB, 2 * GIB, 40 * GIB, 10 * GIB, 14 * GIB, 36 * GIB, 30 * GIB)
    monkeypatch.setattr(Room, "of", classmethod(lambda cls, device: room))
    error = told(memory, torch.OutOfMemoryError(FULL), what=share(64, 1))
    fixed = sum(
        error.memory[name] for name in ("weights", "gradients", "optimizer state", "buffers", "input")
    )
    assert error.memory["activations and workspace"] == 36 * GIB - fixed
    assert error.memory["reserved but unallocated"] == 4 * GIB
    assert error.memory["other processes, and outside of torch"] == 30 * GIB
    # 38.5 GiB were needed by 64 samples at least, and 40 GiB may be taken: half as many at most.
    assert error.fits == 32
    assert "of which this process may take 40.0 GiB" in str(error)
    smaller = Situation(
        "forward", 64, 64, "math", 8, "fp32", True, lambda: None, fixed=1, activations=64, room=21
    )
    assert smaller.fits == 18
    assert any("micro_batch=18" in line for line in advice(smaller))


def test_an_error_of_the_host_is_told_of_the_host_and_others_pass():
    memory, _ = memory_of()
    memory._device = torch.device("meta")
    assert told(memory, MemoryError("Unable to allocate 8 bytes")).device == "cpu"
    with pytest.raises(ValueError, match="mine"), memory.explains("step"):
        raise ValueError("mine")


def lines(phase="forward", samples=8, level="math", why=None, **more):
    return "\n".join(advice(Situation(phase, samples, 16, level, 4, "fp32", True, lambda: why, **more)))


def test_advice_names_nothing_that_does_not_help():
    assert "micro_batch=4" in lines()
    assert "--on-oom adapt" not in lines()
    assert "--on-oom adapt" in lines(adapts=True)
    assert "micro_batch=" not in lines(samples=1)
    assert "micro_batch=" not in lines("update", adapts=True)
    assert "foreach=False" in lines("update")
    assert "--shards 8" in lines(level="bits")
    assert "micro_batch=" not in lines(level="bits", adapts=True)
    refused = lines(why="statistics", adapts=True)
    assert "another result: statistics" in refused
    assert "on-oom" not in refused
    assert "leave no room" in lines(fixed=9, activations=8, room=9)


def test_at_one_sample_at_once_neither_a_smaller_batch_nor_more_devices_help():
    for told in ("a smaller global batch (batch_size, here 16)", "more devices"):
        assert told in lines()
        assert told not in lines(samples=1)
    assert "a device with more memory" in lines(samples=1)


def test_recomputing_is_named_to_a_model_that_has_blocks():
    assert "2 blocks by settings={'recompute': True}" in lines(blocks=2)
    assert "on-oom" not in lines(blocks=2)
    assert lines(blocks=2, adapts=True, why="statistics").count("--on-oom adapt") == 1
    for none in ({}, {"recomputes": True}):
        assert "torch.utils.checkpoint" in lines(**none)
        assert "recompute=true" not in lines(**none)


@pytest.mark.parametrize("level", ["math", "bits"])
def test_flat_gradients_and_averages_are_parts(ranks, level):
    """On two ranks a step holds the gradients that travel beside those of the model, or in place of them."""

    def task(context):
        from kway.strategies.engine import Engine
        from kway.training.parts import training_parts

        x = torch.zeros(8, 50)
        model = nn.Linear(50, 40)
        job = kway.Job(
            model=model,
            loss=nn.MSELoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=(x, torch.zeros(8, 40)),
            batch_size=4,
            ema=0.9,
        )
        parts, _ = training_parts(job)
        engine = Engine(job, model, {"data": 2}, context.world, level, 4, 4)
        try:
            loader = engine.loader(parts)
            for step, share in enumerate(loader.epoch(0)):
                engine.step(share, step)
            return engine.memory._holdings(CPU).bytes
        finally:
            engine.close()

    held = ranks.run(task)[0]
    weights = 4 * 40 * 51
    assert held["weights"] == held["moving average"] == weights
    assert weights <= held["gradients"] <= 3 * weights
    assert held["optimizer state"] == 0
    assert held["input"] >= 4 * 8 * 90
