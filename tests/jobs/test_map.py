"""Independent jobs, one a device at a time: order, what travels, what fails, and what is left behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import kway
from kway.errors import ItemError, KwayError, UsageError

fast = pytest.mark.usefixtures("forks", "leftovers")


def surroundings(item):
    return item, os.getpid(), torch.get_num_threads(), sorted(os.sched_getaffinity(0))


def drawn(item):
    return float(torch.rand(())), float(np.random.rand()), random.random()


@fast
def test_results_are_in_the_order_of_items_whichever_is_done_first():
    def slower_first(item):
        time.sleep(0.5 if item == 0 else 0)
        return item * item

    assert kway.map(slower_first, iter(range(5)), "cpu:2") == [0, 1, 4, 9, 16]


@fast
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity mask")
def test_each_process_keeps_to_its_part_of_the_cores_and_is_used_again():
    found = kway.map(surroundings, range(6), "cpu:2")
    processes = {pid for _, pid, _, _ in found}
    assert len(processes) == 2
    assert os.getpid() not in processes
    cores = {pid: set(mine) for _, pid, _, mine in found}
    usable = os.sched_getaffinity(0)
    first, second = cores.values()
    if len(usable) > 1:
        assert not first & second
    assert first | second == usable
    assert {threads for _, _, threads, _ in found} == {max(1, len(usable) // 2)}


@fast
def test_no_more_processes_than_items():
    assert len({pid for _, pid, _, _ in kway.map(surroundings, ["one"], "cpu:2")}) == 1
    assert kway.map(surroundings, [], "cpu:2") == []


@fast
def test_what_a_call_draws_depends_on_its_item_alone():
    before = torch.get_rng_state()
    one, two = kway.map(drawn, range(4), "cpu"), kway.map(drawn, range(4), "cpu:2")
    assert one == two
    assert len(set(one)) == 4
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(torch.initial_seed() + 1)
        assert kway.map(drawn, range(1), "cpu") != one[:1]


@fast
def test_each_call_gets_a_new_function_and_the_settings_of_the_caller():
    held = []

    def keeps(item):
        held.append(item)
        torch.set_num_threads(3)
        return list(held), torch.ones(()).dtype, item

    torch.set_default_dtype(torch.float64)
    try:
        found = kway.map(keeps, [torch.arange(50_000), torch.arange(3)], "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [len(seen) for seen, _, _ in found] == [1, 1]
    assert {dtype for _, dtype, _ in found} == {torch.float64}
    assert torch.equal(found[0][2], torch.arange(50_000))
    assert held == []


@fast
def test_training_inside_uses_the_one_device():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(24) % 2

    def fold(held_out):
        kept = torch.arange(24) % 3 != held_out
        job = kway.Job(
            model=lambda: nn.Linear(3, 2), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
            data=(x[kept], y[kept]), validation=(x[~kept], y[~kept]), batch_size=4, precision="fp64",
        )  # fmt: skip
        return kway.train(job, epochs=1, tune=False)

    here, there = [fold(item) for item in range(3)], kway.map(fold, range(3), "cpu:2")
    for one, other in zip(here, there, strict=True):
        assert other.record.device_set == ["cpu"]
        assert other.epochs[0]["validation_loss"] == pytest.approx(
            one.epochs[0]["validation_loss"], rel=1e-12
        )
        assert torch.allclose(other.model.weight, one.model.weight, rtol=1e-12)


def fails_at_two(item):
    if item == 2:
        raise ValueError("bad\nand worse")
    if item == 3:
        raise UsageError("kway's own", "need", "do")
    if item == 4:
        sys.exit(7)
    return item


@fast
def test_a_failure_says_which_item_and_ends_the_others():
    def waits(item):
        if item == 1:
            return fails_at_two(2)
        while True:
            time.sleep(60)

    with pytest.raises(ItemError) as caught:
        kway.map(waits, range(8), "cpu:2")
    assert (caught.value.item, caught.value.device, caught.value.exit_code) == (1, "cpu", 1)
    assert str(caught.value).splitlines()[-1] == "item 1 on cpu failed: ValueError: bad"
    assert 'raise ValueError("bad' in caught.value.traceback
    assert "mapping.py" not in caught.value.traceback
    assert "call.py" not in caught.value.traceback


@fast
def test_failures_may_stand_among_the_results():
    found = kway.map(fails_at_two, range(6), "cpu:2", errors="return")
    assert [found[place] for place in (0, 1, 5)] == [0, 1, 5]
    assert [type(found[place]) for place in (2, 3, 4)] == [ItemError] * 3
    assert isinstance(found[3].__cause__, UsageError)
    assert str(found[3].__cause__) == "kway's own: need; do"
    assert found[2].__cause__ is None
    assert [each.item for each in found[2:5]] == [2, 3, 4]
    assert found[4].exit_code == 7


@fast
def test_a_dead_process_costs_its_item_alone():
    def dies(item):
        if item == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return item, os.getpid()

    found = kway.map(dies, range(4), "cpu", errors="return")
    assert isinstance(found[1], ItemError)
    assert "SIGKILL" in found[1].cause
    assert (found[1].exit_code, found[1].died) == (128 + 9, True)
    assert [each[0] for each in (found[0], *found[2:])] == [0, 2, 3]
    assert found[2][1] == found[3][1] != found[0][1]
    with pytest.raises(ItemError, match="item 1 on cpu failed: its process was killed by SIGKILL"):
        kway.map(dies, range(4), "cpu:2")


@fast
def test_what_calls_print_is_marked_with_their_item(capfd):
    def says(item):
        print(f"this is {item}")

    kway.map(says, "abc"[:0] or ["a", "b", "c"], "cpu:2")
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[item 0] this is a", "[item 1] this is b", "[item 2] this is c"
    ]  # fmt: skip


@fast
def no_result(*told):
    raise ValueError(f"nothing to make of {told}")


class CannotBeMade:
    def __reduce__(self):
        return no_result, (1,)


def test_a_result_that_cannot_be_loaded_is_a_failure_of_its_item():
    found = kway.map(lambda item: CannotBeMade() if item == 1 else item, range(3), "cpu", errors="return")
    assert (found[0], found[2]) == (0, 2)
    assert isinstance(found[1], kway.ItemError)
    assert "item 1" in str(found[1])
    assert "cannot be loaded: ValueError: nothing to make of" in str(found[1])
    with pytest.raises(kway.ItemError, match="cannot be loaded"):
        kway.map(lambda item: CannotBeMade(), range(2), "cpu")


def test_a_result_that_cannot_travel_is_a_failure_of_its_item():
    (found,) = kway.map(lambda item: {"lock": threading.Lock()}, [0], "cpu", errors="return")
    assert isinstance(found.__cause__, UsageError)
    assert "the result of items[0]['lock']" in str(found.__cause__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "fn is of type int"),
        ({"items": 3}, "items is of type int"),
        ({"items": "abc"}, "items is of type str"),
        ({"items": [0, {"a": threading.Lock()}]}, r"items\[1\]\['a'\]: a '_thread.lock' cannot be sent"),
        ({"errors": "ignore"}, "errors='ignore'"),
        ({"devices": "cpu:0"}, "asks for 0 devices"),
        ({"devices": "tpu"}, "device set 'tpu'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments, message, monkeypatch):
    monkeypatch.setattr("kway.jobs.mapping.Pool", None)
    with pytest.raises(UsageError, match=message):
        kway.map(**{"fn": abs, "items": [1], "devices": "cpu:2", **arguments})


def test_a_function_that_cannot_travel_is_refused(monkeypatch):
    monkeypatch.setattr("kway.jobs.mapping.Pool", None)
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"fn\.lock: a '_thread\.lock' cannot be sent"):
        kway.map(lambda item: lock, [1], "cpu:2")


def test_ranks_do_not_map(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match=r"kway\.map inside 2 ranks that are already there"):
        kway.map(abs, [1], "cpu:2")


def test_a_star_leaves_pythons_own_map():
    names = {}
    exec("from kway import *", names)
    assert "train" in names
    assert "map" not in names


@pytest.mark.starts
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_go_with_the_one_that_asked(number, tmp_path, leftovers):
    script = tmp_path / "script.py"
    script.write_text(
        "import time, kway\n\n\ndef f(item):\n    print('at work', flush=True)\n    time.sleep(60)\n\n\n"
        "kway.map(f, range(4), 'cpu:2')\n"
    )
    # Started as scripts are: not forked, and without a guard for ``__main__``.
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert {process.stdout.readline().strip() for _ in range(2)} == {
            "[item 0] at work", "[item 1] at work"
        }  # fmt: skip
        process.send_signal(number)
        code = process.wait(20)
    assert code == {signal.SIGINT: -2, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]


@pytest.mark.starts
@fast
def test_a_process_that_cannot_start_ends_all(monkeypatch):
    monkeypatch.setattr("kway.jobs.mapping._PRELOAD", ("no_such_module",))
    with pytest.raises(KwayError, match="no_such_module"):
        kway.map(abs, range(3), "cpu:2", errors="return")


@pytest.mark.gpu
def test_on_a_gpu_a_call_sees_its_own_only_and_an_error_of_cuda_costs_its_item_alone():
    def on_gpu(item):
        if item == 1:
            torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")].cpu()
        return torch.cuda.device_count(), float(torch.full((3,), float(item), device="cuda").sum())

    found = kway.map(on_gpu, range(4), "cuda", errors="return")
    assert isinstance(found[1], ItemError)
    assert [found[place] for place in (0, 2, 3)] == [(1, 0.0), (1, 6.0), (1, 9.0)]
