import os
import resource
import shutil
import socket
import time
from types import SimpleNamespace

import pytest
from tests.devices.system_tree import planted

from kway.devices.cgroup import process_limit
from kway.devices.simulated import simulated
from kway.devices.system_checks import (
    checks,
    host_name,
    loopback,
    processors,
    shared_memory,
    temporary_files,
    variables,
)

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("free", "outcome"), [(8 * GIB, "ok"), (GIB, "ok"), (64 * MIB, "warn"), (8 * MIB, "fail")]
)
def test_shared_memory_by_what_is_free(tmp_path, free, outcome):
    found = shared_memory(tmp_path, lambda folder: (16 * GIB, 0, free))
    assert found.outcome == outcome
    assert ("--shm-size" in found.do) == (outcome != "ok")


def test_shared_memory_that_is_not_there(tmp_path):
    found = shared_memory(tmp_path / "none")
    assert (found.outcome, found.found) == ("warn", f"{tmp_path / 'none'} is not there")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_shared_memory_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o555)
    try:
        assert shared_memory(tmp_path, lambda folder: (GIB, 0, GIB)).outcome == "fail"
    finally:
        tmp_path.chmod(0o755)


def test_folders_for_temporary_files(tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    assert temporary_files(none).outcome == "fail"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=MIB))
    found = temporary_files(lambda: str(tmp_path))
    assert (found.outcome, found.found) == ("warn", f"1.0 MiB free in {tmp_path}")


def test_loopback_is_tried():
    assert loopback().outcome == "ok"
    # An address that is no machine's own.
    found = loopback("192.0.2.1")
    assert found.outcome == "fail"
    assert "no connection at 192.0.2.1" in found.found


def test_a_name_that_resolves_fast_is_well():
    assert host_name(lambda: "localhost").outcome == "ok"


def test_a_name_that_nobody_knows():
    def unknown(name, port):
        raise socket.gaierror(-2, "Name or service not known")

    found = host_name(lambda: "box", unknown)
    assert (found.outcome, found.do) == ("warn", "add it to /etc/hosts: 127.0.1.1 box")
    assert found.found == "'box' does not resolve (Name or service not known)"


def test_a_name_service_that_does_not_answer():
    found = host_name(lambda: "box", lambda name, port: time.sleep(5), patience=0.05)
    assert (found.outcome, found.found) == ("warn", "'box' is looked up for more than 0.05 s")


@pytest.mark.parametrize(
    ("cpu", "environ", "outcome", "words"),
    [
        ({}, {}, "ok", "8 of 8 usable"),
        ({"quota": 2.0, "usable": 2}, {}, "warn", "the time of 2"),
        ({}, {"OMP_NUM_THREADS": "16"}, "warn", "OMP_NUM_THREADS=16"),
        ({}, {"OMP_NUM_THREADS": "4,2"}, "ok", ""),
    ],
)
def test_processors(cpu, environ, outcome, words):
    found = processors(simulated().cpu | cpu, environ)
    assert found.outcome == outcome
    assert words in found.found


def test_misspelled_variables():
    assert variables({"OMP_NUM_THREADS": "1"}).outcome == "ok"
    assert variables({"OMP_NUM_THREAD": "1"}).outcome == "warn"


def test_limits_of_control_groups_on_processes(tmp_path):
    files = {
        "proc/self/cgroup": "0::/box/inner",
        "sys/fs/cgroup/box/pids.max": "300",
        "sys/fs/cgroup/box/inner/pids.max": "max",
    }
    assert process_limit(planted(tmp_path, files)) == 300
    assert process_limit(tmp_path / "none") is None
    shm = tmp_path / "dev/shm"
    shm.mkdir(parents=True)
    found = {check.name: check for check in checks(simulated(), {}, tmp_path)}
    assert found["processes"].outcome == "warn"
    assert str(shm) in found["shared memory"].found
    assert len(found) == 9


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY,
    reason="all memory may be locked",
)
@pytest.mark.parametrize(("state", "outcome"), [("ACTIVE", "warn"), ("DOWN", "ok")])
def test_infiniband_that_is_active_asks_for_locked_memory(state, outcome):
    cluster = simulated()
    cluster.infiniband.append({"state": state})
    found = {check.name: check.outcome for check in checks(cluster, {})}
    assert found["locked memory"] == outcome
