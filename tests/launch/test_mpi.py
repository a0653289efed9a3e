import os
import subprocess
import sys
from pathlib import Path

import pytest

from kway.errors import UsageError
from kway.launch import mpi
from kway.launch.address import environment
from kway.launch.init_method import InitMethod
from kway.launch.torchrun import check_outside, from_environment, meeting_point
from kway.world import World

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
ON_ONE_MACHINE = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEET = {"KWAY_INIT_METHOD": "tcp://node-0:29500"}


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA])
def test_ranks_of_mpirun_know_their_place(variables):
    assert from_environment({**variables, **MEET}, threads=2) == World(5, 8, 1, 4, "cpu", "gloo", 2, "env")
    assert from_environment({**variables, **MEET}, device="cuda").device == "cuda:1"


def test_what_torchrun_says_counts_before_mpirun():
    """One torchrun a machine, started by mpirun, is a usual way."""
    environ = {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    world = from_environment(environ)
    assert (world.rank, world.size, world.local_size) == (0, 2, 2)


def test_a_wrapper_may_say_the_local_place():
    world = from_environment(
        {"PMI_RANK": "5", "PMI_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", **MEET}
    )
    assert (world.local_rank, world.local_size) == (2, 4)


def test_one_process_of_mpirun_is_alone():
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert from_environment(alone) is None
    check_outside(alone)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PMI_RANK": "1"}, "PMI_RANK is set, PMI_SIZE is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is set, OMPI_COMM_WORLD_RANK is not"),
        ({**HYDRA, "PMI_RANK": "8", **MEET}, "RANK=8 with WORLD_SIZE=8"),
        ({**HYDRA, "KWAY_INIT_METHOD": "nowhere"}, "KWAY_INIT_METHOD='nowhere'"),
        ({**HYDRA, "MASTER_ADDR": "node-0"}, "MASTER_PORT is not set"),
        (
            HYDRA,
            r"8 ranks of mpirun on several machines \(4 on this one\): .* mpirun -x KWAY_INIT_METHOD=tcp:",
        ),
    ],
)
def test_what_cannot_work_is_named(environ, words):
    with pytest.raises(UsageError, match=words):
        from_environment(environ)


def test_nobody_starts_ranks_in_each_rank_of_mpirun():
    with pytest.raises(UsageError, match=r"rank 5 of 8 already \(mpirun\)"):
        check_outside(OPEN_MPI)


def test_ranks_that_kway_starts_hear_nothing_of_mpirun():
    """MPI in them would take each for the one rank that started them."""
    inherited = {**OPEN_MPI, **HYDRA, **MEET, "PMIX_NAMESPACE": "1", "HOME": "/h"}
    made = environment(["cpu", "cpu"], 1, inherited)
    assert not {*OPEN_MPI, *HYDRA, *MEET, "PMIX_NAMESPACE"} & made.keys()
    assert made["HOME"] == "/h"


def test_on_one_machine_the_process_that_started_them_names_the_place():
    method = meeting_point(ON_ONE_MACHINE, 2, 2)
    assert method == InitMethod(path=mpi.meeting_file(ON_ONE_MACHINE), own=True)
    assert f"-{os.getppid()}-" in str(method)
    named = {**ON_ONE_MACHINE, "MASTER_ADDR": "node-0", "MASTER_PORT": "1"}
    assert meeting_point(named, 2, 2) == InitMethod()
    assert meeting_point({**named, **MEET}, 2, 2) == InitMethod("node-0", 29500)


@pytest.mark.starts
@pytest.mark.skipif(sys.platform != "linux", reason="looks for ancestors in /proc")
def test_shells_between_a_rank_and_what_started_it_are_no_launchers(leftovers):
    source = Path(mpi.__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(source)!r}); from kway.launch import mpi; import os; "
    code += "print(mpi.launcher(os.environ), mpi.meeting_file(os.environ))"
    plain = [sys.executable, "-S", "-c", code]
    ways = [plain, ["sh", "-c", '"$@"; true', "sh", *plain]]
    # The last has a launcher of its own: what started it is a rank of another job, or none.
    ways.append(["env", "-u", "PMI_RANK", "sh", "-c", 'PMI_RANK=1 "$@"; true', "sh", *plain])
    found = []
    for way in ways:
        environ = {**os.environ, **ON_ONE_MACHINE}
        found.append(
            subprocess.run(way, env=environ, capture_output=True, text=True, check=True).stdout.split()
        )
    (first, first_file), (behind_a_shell, same_file), (other, other_file) = found
    assert int(first) == int(behind_a_shell) == os.getpid()
    assert first_file == same_file
    assert int(other) != os.getpid()
    assert other_file != first_file


@pytest.mark.parametrize(
    ("own", "whole", "ranks", "threads", "cores"),
    [
        (1, 8, 2, 1, 8),  # bound to a core
        (4, 8, 2, 4, 8),  # to a socket of its own
        (4, 8, 4, 2, 8),  # to a socket that two share
        (8, 8, 2, 4, 0),  # not bound
    ],
)
def test_a_rank_that_is_bound_to_cores_has_these_to_itself(own, whole, ranks, threads, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(whole if pid else own)))
    environ = {**ON_ONE_MACHINE, "PMI_SIZE": str(ranks), "MPI_LOCALNRANKS": str(ranks)}
    world = from_environment(environ)
    assert (world.threads, world.cores) == (threads, cores)
