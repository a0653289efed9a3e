import os
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from kway.errors import KwayError, RankError, UsageError
from kway.launch.local import Ranks, run


def place(context):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return context.world, {name: int(os.environ[name]) for name in names}, torch.get_num_threads()


def total(context, value):
    tensor = torch.tensor([value + context.world.rank])
    dist.all_reduce(tensor)
    return int(tensor), dist.get_world_size()


def test_a_rank_knows_its_place(ranks):
    for size in (3, 1):
        for rank, (world, variables, threads) in enumerate(ranks.run(place, size=size)):
            assert (world.rank, world.local_rank, world.size, world.local_size) == (rank, rank, size, size)
            assert (world.device, world.backend, world.origin, world.threads) == ("cpu", "gloo", "local", 1)
            assert variables["RANK"] == variables["LOCAL_RANK"] == rank
            assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == size
            assert variables["OMP_NUM_THREADS"] == threads == 1


@pytest.mark.parametrize("size", [4, 1, 2, 3])
def test_each_task_has_a_group_of_its_own_size(ranks, size):
    expected = sum(10 + rank for rank in range(size))
    assert ranks.run(total, 10, size=size) == [(expected, size)] * size


def test_a_task_may_end_its_group_itself(ranks):
    def ends(context):
        dist.barrier()
        dist.destroy_process_group()
        return context.world.rank

    assert ranks.run(ends) == [0, 1]
    assert ranks.run(total, 0) == [(1, 2)] * 2


def test_a_rank_with_nothing_to_do_waits_for_the_others(ranks):
    for _ in range(20):
        assert ranks.run(lambda context: context.world.rank, size=4) == [0, 1, 2, 3]


def test_events_arrive_here_and_in_order(ranks):
    def tell(context):
        for step in range(50):
            context.emit((context.world.rank, step))

    heard, threads = [], set()

    def on_event(event):
        heard.append(event)
        threads.add(threading.current_thread())

    ranks.run(tell, on_event=on_event)
    for rank in (0, 1):
        assert [step for who, step in heard if who == rank] == list(range(50))
    assert threads == {threading.current_thread()}


def test_large_arguments_are_private_to_each_rank_and_results_come_back(ranks):
    def change(context, tensor, array):
        tensor += context.world.rank + 1
        array += context.world.rank + 1
        return tensor, float(array.mean())

    tensor, array = torch.zeros(50_000), np.zeros(50_000)
    got = ranks.run(change, tensor, array)
    for rank, (changed, mean) in enumerate(got):
        assert torch.equal(changed, torch.full((50_000,), rank + 1.0))
        assert mean == rank + 1
    assert tensor.sum() == 0 == array.sum()


def test_classes_defined_here_come_back_as_themselves(ranks):
    class Point:
        def __init__(self, x):
            self.x = x

    def move(context, point):
        return Point(point.x + context.world.rank)

    got = ranks.run(move, Point(1))
    assert [type(point) for point in got] == [Point, Point]
    assert [point.x for point in got] == [1, 2]


def test_what_cannot_travel_is_refused_and_the_ranks_go_on(ranks):
    with pytest.raises(UsageError, match=r"value: a '_thread.lock'"):
        ranks.run(total, threading.Lock())
    assert ranks.run(total, 1) == [(3, 2)] * 2


def test_a_result_that_cannot_travel_is_named(ranks):
    def returns_a_lock(context):
        return {"lock": threading.Lock()}

    with pytest.raises(UsageError, match=r"the result of a rank\['lock'\]: a '_thread.lock'"):
        ranks.run(returns_a_lock)


@pytest.mark.parametrize("kind", ["tee", "none"])
def test_a_stream_that_user_code_replaced_costs_neither_result_nor_cause(ranks, kind):
    class Tee:
        def write(self, text):
            pass

    def replaces(context, fails):
        sys.stdout = Tee() if kind == "tee" else None
        if fails == context.world.rank:
            raise ValueError("the cause")
        return context.world.rank

    try:
        assert ranks.run(replaces, None) == [0, 1]
        with pytest.raises(RankError, match="ValueError: the cause") as caught:
            ranks.run(replaces, 1)
        assert caught.value.rank == 1
    finally:
        ranks.of(2).close()


def test_modules_beside_the_script_are_found(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("def f(context):\n    return context.world.rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside

    monkeypatch.chdir(tmp_path)
    assert run(beside.f, ["cpu", "cpu"], group=False) == [0, 1]


def test_a_file_beside_the_script_that_is_named_like_one_of_pythons_hides_none(tmp_path, monkeypatch):
    (tmp_path / "glob.py").write_text("raise ImportError('not this one')")
    monkeypatch.syspath_prepend(str(tmp_path))
    first, sum_of_one = run(lambda context: (sys.path[0], total(context, 1)), ["cpu"])[0]
    assert first == str(tmp_path)
    assert sum_of_one == (1, 1)


def test_temporary_files_of_multiprocessing_go_with_ranks_that_are_killed():
    def makes(context):
        from multiprocessing.connection import Listener

        makes.kept = Listener(family="AF_UNIX")
        return makes.kept.address

    ranks = Ranks(["cpu"], group=False)
    (address,) = ranks.run(makes)
    assert Path(address).is_socket()
    # No longer than where it would be by itself.
    assert len(address) <= len(f"{tempfile.gettempdir()}/pymp-12345678/listener-12345678")
    ranks.close(kill=True)
    assert not Path(address).parent.exists()


def test_without_a_group_torch_stays_out():
    def has_torch(context):
        return "torch" in sys.modules

    assert run(has_torch, ["cpu"], group=False) == [False]


def test_modules_named_for_it_are_imported_before_the_task():
    def loaded(context):
        return "wave" in sys.modules

    assert run(loaded, ["cpu"], group=False, preload=["wave"]) == [True]
    assert run(loaded, ["cpu"], group=False) == [False]


@pytest.mark.starts
def test_nothing_starts_where_the_task_cannot_travel(leftovers):
    ranks = Ranks(["cpu"] * 2, group=False)
    with pytest.raises(UsageError):
        ranks.run(place, threading.Lock())
    assert leftovers() == {}
    ranks.close()


@pytest.mark.parametrize(
    ("devices", "size"), [([], None), (["cpu", "cuda:0"], None), (["cpu"], 2), (["cpu"], 0)]
)
def test_impossible_ranks_are_refused(devices, size):
    with pytest.raises(UsageError):
        Ranks(devices, group=False).run(place, size=size)


def test_ranks_that_are_gone_say_so():
    ranks = Ranks(["cpu"], group=False)
    ranks.close()
    assert not ranks.alive
    with pytest.raises(KwayError, match="start new ones"):
        ranks.run(place)


def test_prints_reach_this_process_marked_and_the_logs_whole(tmp_path, capsys):
    def say(context):
        print(f"out {context.world.rank}")
        print(f"err {context.world.rank}", file=sys.stderr)
        print("no end", end="")

    run(say, ["cpu"] * 2, group=False, logs=tmp_path)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [
        "[rank 0] no end",
        "[rank 0] out 0",
        "[rank 1] no end",
        "[rank 1] out 1",
    ]
    assert sorted(err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]
    for rank in (0, 1):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert all(text in log for text in (f"out {rank}\n", f"err {rank}\n", "no end"))


@pytest.mark.starts
@pytest.mark.usefixtures("forks")
def test_two_jobs_at_once_from_two_threads(leftovers, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "name.that.does.not.resolve.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    results = {}

    def job(name, value):
        results[name] = run(total, ["cpu"] * 2, value, threads=1)

    threads = [threading.Thread(target=job, args=(name, value)) for name, value in (("a", 1), ("b", 10))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": [(3, 2)] * 2, "b": [(21, 2)] * 2}


@pytest.mark.starts
def test_many_launches_at_once(leftovers):
    def work(context):
        return os.environ["MASTER_PORT"]

    ports = [None] * 8

    def job(index):
        first, second = run(work, ["cpu"] * 2, group=False)
        assert first == second
        ports[index] = first

    threads = [threading.Thread(target=job, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in ports


@pytest.mark.starts
def test_a_task_past_its_limit_is_ended_and_named(leftovers):
    def hang(context):
        while context.world.rank == 1:
            pass

    ranks = Ranks(["cpu"] * 2, group=False)
    ranks.run(lambda context: None)  # so that the limit holds no start
    with pytest.raises(KwayError, match=r"no end of rank 1 after 1\.5 s"):
        ranks.run(hang, limit=timedelta(seconds=1.5))
    assert not ranks.alive


@pytest.mark.starts
def test_an_interpreter_that_does_not_start_is_named(leftovers, monkeypatch, tmp_path):
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    ranks = Ranks(["cpu"] * 2, group=False, preload=["stuck"], start_timeout=timedelta(seconds=0.5))
    with pytest.raises(KwayError, match="no sign of life from ranks 0, 1"):
        ranks.run(place)


@pytest.mark.gpu
def test_a_rank_on_a_gpu_has_its_own_current_device():
    def where(context):
        tensor = torch.ones(1, device="cuda")
        dist.all_reduce(tensor)
        return str(tensor.device), context.world.device, context.world.backend, tensor.item()

    count = min(torch.cuda.device_count(), 2)
    got = run(where, [f"cuda:{index}" for index in range(count)])
    assert got == [(f"cuda:{rank}", f"cuda:{rank}", "nccl", float(count)) for rank in range(count)]
