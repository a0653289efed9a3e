"""Collectives between threads of one process, and how they wait for each other and take turns."""

import random
import threading
import time

import pytest
import torch

from kway.comm.group import Group
from kway.comm.threads import ThreadGroup
from kway.errors import MispairedError, RefusedError
from kway.launch import threads
from kway.launch.shared_process import SharedProcess
from kway.step.process_wide import drawing, held

SIZES = [2, 3, 5]


def meet(size, task):
    """Call ``task(group)`` on each of ``size`` threads; results by rank."""
    process = SharedProcess(size, held, drawing)
    return threads.run(lambda rank: task(ThreadGroup(process, rank, size)), process)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 5, 16_385, 40_001])
def test_sums_are_those_in_rank_order_on_every_rank(size, count):
    parts = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    right = parts[0].clone()
    for part in parts[1:]:
        right += part

    def task(group):
        own, ahead = parts[group.rank].clone(), parts[group.rank].clone()
        wait = group.apart().begin_sum(ahead)
        returned = group.sum_(own)
        wait()
        return returned is own, own, ahead

    for same, own, ahead in meet(size, task):
        assert same
        assert torch.equal(own, right)
        assert torch.equal(ahead, right)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, torch.complex64, torch.int64])
def test_what_is_gathered_and_sent_arrives(size, dtype):
    def task(group):
        own = torch.full((2, 3), group.rank + 1).to(dtype)
        every = group.stack(own)
        # What was handed over is not what changes afterwards.
        own.zero_()
        group.barrier()
        first = group.broadcast_(torch.full((4,), group.rank).to(dtype))
        sizes = [rank + 1 for rank in range(size)]
        sent = torch.cat([torch.full((n,), 10 * group.rank + to) for to, n in enumerate(sizes)]).to(dtype)
        answer = group.exchange(sent, sizes, [group.rank + 1] * size)
        sent.zero_()
        return every, first, answer(), group.objects({"rank": group.rank})

    for rank, (every, first, received, objects) in enumerate(meet(size, task)):
        assert torch.equal(every, torch.stack([torch.full((2, 3), r + 1).to(dtype) for r in range(size)]))
        assert torch.equal(first, torch.zeros(4).to(dtype))
        right = torch.cat([torch.full((rank + 1,), 10 * r + rank) for r in range(size)]).to(dtype)
        assert torch.equal(received, right)
        assert objects == [{"rank": r} for r in range(size)]


def test_objects_are_copies():
    own = [[], []]
    found = meet(2, lambda group: group.objects(own[group.rank]))
    found[0][1].append(1)
    assert own == found[1] == [[], []]


@pytest.mark.parametrize(
    "task",
    [
        lambda group: group.barrier() if group.rank else group.stack(torch.zeros(1)),
        lambda group: group.sum_(torch.zeros(1 + group.rank)),
        lambda group: [group.barrier() for _ in range(1 + group.rank)],
    ],
)
def test_ranks_that_call_other_collectives_hear_of_it(task):
    with pytest.raises(MispairedError, match="rank"):
        meet(2, task)


def test_ranks_that_send_other_numbers_than_are_awaited_hear_of_it():
    def task(group):
        # The first rank sends the second one entry, which awaits two.
        sent, awaited = ([2, 1], [2, 2]) if group.rank == 0 else ([2, 2], [2, 2])
        return group.exchange(torch.zeros(sum(sent)), sent, awaited)()

    with pytest.raises(MispairedError, match="rank 1 awaits 2 entries of rank 0 in all-to-all, which sent 1"):
        meet(2, task)


def begun(group):
    """Begin what runs side by side, and never end it."""
    return group.side_by_side().__enter__()


def ended(group):
    with group.side_by_side():
        pass


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            lambda group: (group if group.rank else group.apart()).sum_(torch.zeros(3)),
            r"rank 0 waits in all-reduce of torch.float32, shape \[3\] \(call 1 of series /1\), rank 1 waits .*1\)",
        ),
        (
            lambda group: begun(group) if group.rank else group.barrier(),
            r"0 waits in barrier .*1 waits to begin",
        ),
        (
            lambda group: [begun(group)] and group.rank and group.barrier(),
            "rank 0 has left while rank 1 waits in",
        ),
        (lambda group: group.rank and begun(group), "rank 0 has left while rank 1 waits to begin a step"),
        (
            lambda group: ended(group) if group.rank else begun(group),
            "rank 0 has left while rank 1 waits to end",
        ),
        (
            lambda group: ended(group) if group.rank else begun(group) or group.barrier(),
            "0 waits in .*1 waits to end",
        ),
    ],
)
def test_ranks_that_wait_for_ever_hear_what_each_waits_for(task, said):
    with pytest.raises(MispairedError, match=said):
        meet(2, task)


@pytest.mark.timeout(20)
def test_ranks_wait_in_vain_once_the_last_one_at_work_has_left():
    def task(group):
        ahead = group.apart()
        if group.rank == 2:
            group.begin_sum(torch.zeros(3))
            ahead.begin_sum(torch.zeros(3))
        else:
            (group if group.rank else ahead).sum_(torch.zeros(3))

    with pytest.raises(MispairedError, match=r"rank 0 waits in .* rank 1 waits in .* rank 2 has left"):
        meet(3, task)


@pytest.mark.timeout(20)
def test_nobody_goes_on_where_the_last_one_fails_before_all_do():
    def broken():
        raise OSError("no generator")

    def task(rank):
        group = ThreadGroup(process, rank, 2)
        try:
            with group.side_by_side():
                went_on.append(rank)
        except OSError:
            group.barrier()

    process, went_on = SharedProcess(2, held, broken), []
    with pytest.raises(MispairedError, match="waits to begin a step"):
        threads.run(task, process)
    assert went_on == []


def test_the_first_failure_ends_all_and_is_raised_as_it_is():
    ended = []

    def task(group):
        try:
            group.barrier()
            if group.rank == 1:
                # Not before all are there: one that has not begun does not begin.
                raise KeyError("mine")
            group.barrier()
        finally:
            ended.append(group.rank)

    with pytest.raises(KeyError, match="mine") as found:
        meet(3, task)
    assert sorted(ended) == [0, 1, 2]
    assert "on rank 1 of 3" in found.value.__notes__[0]


def test_each_rank_finds_generators_and_flags_as_it_left_them():
    def task(group):
        torch.manual_seed(group.rank)
        random.seed(group.rank)
        torch.backends.cudnn.benchmark = bool(group.rank % 2)
        numbers = []
        for _ in range(4):
            group.barrier()
            numbers.append((torch.rand(()).item(), random.random(), torch.backends.cudnn.benchmark))
        return numbers

    before, put_back = torch.get_rng_state(), held()
    try:
        for rank, numbers in enumerate(meet(3, task)):
            torch.manual_seed(rank)
            random.seed(rank)
            assert numbers == [(torch.rand(()).item(), random.random(), bool(rank % 2)) for _ in range(4)]
    finally:
        put_back()
    assert torch.equal(torch.get_rng_state(), before)


def test_one_at_a_time_but_where_they_are_let_go_side_by_side():
    inside, most = [], {"turns": 0, "at once": 0}

    def be(rank, where):
        inside.append(rank)
        time.sleep(0.02)
        most[where] = max(most[where], len(inside))
        inside.remove(rank)

    def task(group):
        for _ in range(3):
            be(group.rank, "turns")
            with group.side_by_side():
                be(group.rank, "at once")
                group.sum_(torch.zeros(3))

    meet(3, task)
    assert most["turns"] == 1
    assert most["at once"] > 1


def test_a_draw_side_by_side_is_refused_on_all_ranks():
    refused = []

    def task(group):
        try:
            with group.side_by_side():
                if group.rank:
                    torch.rand(1)
        except RefusedError:
            refused.append(group.rank)

    put_back = held()
    meet(2, task)
    put_back()
    assert sorted(refused) == [0, 1]


def test_threads_are_gone_after_what_interrupts_them():
    def task(group):
        if group.rank == 0:
            raise KeyboardInterrupt
        group.barrier()

    with pytest.raises(KeyboardInterrupt):
        meet(4, task)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kway-rank")]


def test_no_collective_is_left_to_process_groups():
    public = {name for name, value in vars(Group).items() if callable(value) and name[0] != "_"}
    assert public <= {*vars(ThreadGroup)}
