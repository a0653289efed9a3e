import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from kway.errors import KwayError, UsageError
from kway.launch.address import reserved_port
from kway.launch.joining import _check_backend, join
from kway.launch.torchrun import from_environment
from kway.world import World

MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_no_variables_mean_no_other_launcher():
    assert from_environment({}) is None
    assert from_environment({"LOCAL_RANK": "3", "MASTER_ADDR": "x"}) is None


def test_all_variables_as_torchrun_sets_them():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MEET}
    assert from_environment(environ, threads=2) == World(5, 8, 1, 4, "cpu", "gloo", 2, "env")


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (1, 4)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, (3, 8)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_the_local_place_is_derived_where_it_is_not_said(environ, place):
    world = from_environment({**environ, **MEET})
    assert (world.local_rank, world.local_size) == place


def test_one_rank_needs_no_address():
    assert from_environment({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "RANK is set, WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT=70000: ports go to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
    ],
)
def test_contradictions_are_named(environ, words):
    with pytest.raises(UsageError, match=words):
        from_environment({**MEET, **environ})


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "cuda:1"), ("4,5", "cuda:1"), ("5", "cuda:0"), ("GPU-a,GPU-b,", "cuda:1")]
)
def test_a_rank_gets_the_gpu_of_its_local_rank(visible, device):
    environ = {"RANK": "1", "WORLD_SIZE": "2", **MEET}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    world = from_environment(environ, device="cuda")
    assert (world.device, world.backend) == (device, "nccl")


def test_more_ranks_than_gpus_are_refused():
    environ = {"RANK": "2", "WORLD_SIZE": "3", "CUDA_VISIBLE_DEVICES": "0,1", **MEET}
    with pytest.raises(UsageError, match="local rank 2 has no GPU"):
        from_environment(environ, device="cuda")


def test_threads_come_from_the_environment_or_are_shared_out():
    environ = {"RANK": "0", "WORLD_SIZE": "2", **MEET}
    assert from_environment({**environ, "OMP_NUM_THREADS": "3,2"}).threads == 3
    assert from_environment({**environ, "WORLD_SIZE": "10000"}).threads == 1


def test_an_existing_group_is_used_if_it_is_the_one_that_is_meant(ranks):
    def task(context):
        world = context.world
        join(World(rank=world.rank, size=world.size))
        with pytest.raises(UsageError, match=f"says rank {world.rank} of 2"):
            join(World(rank=world.rank, size=world.size + 1))
        return True

    assert ranks.run(task) == [True, True]


def test_a_group_that_the_script_has_made_says_the_place(ranks):
    def task(context):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        rank = context.world.rank
        alike = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
        places = [from_environment()]
        os.environ.update(alike)
        places.append(from_environment())
        # A script may number its ranks otherwise than what started them.
        os.environ.update(PMI_RANK=str(1 - rank), PMI_SIZE="2")
        places.append(from_environment())
        for name in alike:
            del os.environ[name]
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        with pytest.raises(UsageError, match=r"the process group is for cpu:gloo.* computes on tpu"):
            _check_backend(World(device="tpu"))
        return [(world.rank, world.size, world.local_rank, world.local_size) for world in places]

    for rank, places in enumerate(ranks.run(task)):
        assert places == [(rank, 2, rank, 2), (rank, 2, 0, 1), (rank, 2, rank, 2)]


def test_an_address_where_nobody_is_fails_in_time_and_is_named(ranks):
    def task(context, port):
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        join(World(rank=1, size=2), timedelta(seconds=1))

    with reserved_port() as port, pytest.raises(KwayError, match=f"no meeting point at 127.0.0.1:{port}"):
        ranks.run(task, port, size=1, limit=30)


@pytest.mark.starts
def test_a_rank_without_rank_0_says_so_in_one_line():
    """Torch's own client prints its stack in such a case."""
    code = (
        "from datetime import timedelta; from kway.launch.joining import join; from kway.world import World; "
        "from kway.errors import KwayError\n"
        "try: join(World(rank=1, size=2), timedelta(seconds=0.5))\nexcept KwayError as e: print(e)"
    )
    with reserved_port() as port:
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert found.stderr == ""
    (line,) = found.stdout.splitlines()
    assert line.endswith("check MASTER_ADDR and MASTER_PORT, and that rank 0 runs")


def test_a_name_that_nobody_knows_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nope.invalid")
    monkeypatch.setenv("MASTER_PORT", "29500")

    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match=r"MASTER_ADDR='nope\.invalid' cannot be resolved \(Name or"):
        join(World(rank=0, size=2))


def test_a_network_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    with pytest.raises(UsageError, match=r"GLOO_SOCKET_IFNAME names 'nonsense0': .* interfaces .*lo"):
        join(World(rank=0, size=2))


SCRIPT = """
import sys
import torch, torch.distributed as dist
from kway.launch.joining import _check_backend, join
from kway.launch.torchrun import from_environment

world = from_environment()
join(world)
tensor = torch.ones(1)
dist.all_reduce(tensor)
sys.stdout.write(f"rank {world.rank} of {world.size}: {tensor.item():g} {world.origin}\\n")
"""
EXPECTED = ["rank 0 of 2: 2 env", "rank 1 of 2: 2 env"]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "joins.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.starts
def test_ranks_of_torchrun(script, leftovers):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == EXPECTED


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands")
def test_ranks_of_a_plain_shell_loop(script, leftovers):
    with reserved_port() as port:
        started = [
            subprocess.Popen(
                [sys.executable, script],
                env={**os.environ, **MEET, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        answers = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], answers
    assert [out.strip() for out, _ in answers] == EXPECTED
