import socket
import threading

import pytest

from kway.backends import backend_of
from kway.errors import UsageError
from kway.launch.address import (
    check_interface,
    check_name,
    device_of_rank,
    environment,
    listening_socket,
    loopback_interface,
    rank_variables,
    reserved_port,
    wait_for_listener,
)
from kway.launch.local import Ranks
from kway.launch.script import launch


def test_what_another_launcher_left_does_not_reach_the_ranks():
    inherited = {"MASTER_PORT": "1", "RANK": "7", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h"}
    made = environment(["cpu", "cpu"], 2, inherited)
    assert made["HOME"] == "/h"
    assert made["OMP_NUM_THREADS"] == "2"
    assert not {"MASTER_PORT", "RANK", "TORCHELASTIC_RUN_ID"} & set(made)


def test_backends_use_loopback_unless_the_user_says_otherwise():
    assert environment(["cpu"], None, {})["GLOO_SOCKET_IFNAME"] == loopback_interface()
    own = environment(["cpu"], None, {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"})
    assert (own["GLOO_SOCKET_IFNAME"], own["NCCL_SOCKET_IFNAME"]) == ("eth7", "ib0")


def test_a_network_interface_that_is_not_there_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    for start in (lambda: Ranks(["cpu"] * 2), lambda: launch(__file__, [], ["cpu"] * 2)):
        with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME names 'nonsense0'"):
            start()
    there = socket.if_nameindex()[0][1]
    check_interface({"GLOO_SOCKET_IFNAME": there}, "gloo")
    check_interface({"GLOO_SOCKET_IFNAME": "nonsense0"}, "nccl")


def test_a_name_service_that_does_not_answer_is_given_time(monkeypatch):
    def busy(*_):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", busy)
    check_name("node-0", "MASTER_ADDR='node-0'")


def test_waiting_for_a_listener_ends_when_it_is_there():
    with reserved_port() as port, socket.socket() as late:
        with pytest.raises(OSError, match="refused"):
            wait_for_listener("127.0.0.1", port, 0.2)
        late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        late.bind(("127.0.0.1", port))
        timer = threading.Timer(0.3, late.listen)
        timer.start()
        wait_for_listener("127.0.0.1", port, 20)
        timer.join()


def test_threads_are_left_alone_where_nobody_asked():
    assert "OMP_NUM_THREADS" not in environment(["cpu"], None, {})


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, ["cuda:0", "cuda:1"], "0,1"),
        (None, ["cuda:3", "cuda:1"], "3,1"),
        ("4,6,2", ["cuda:2", "cuda:0"], "2,4"),
        ("GPU-aa,GPU-bb", ["cuda:1"], "GPU-bb"),
    ],
)
def test_ranks_see_the_chosen_gpus_in_order(visible, devices, expected):
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment(devices, None, inherited)["CUDA_VISIBLE_DEVICES"] == expected
    assert [device_of_rank(device, rank) for rank, device in enumerate(devices)] == [
        f"cuda:{rank}" for rank in range(len(devices))
    ]
    assert backend_of(devices) == "nccl"


@pytest.mark.parametrize(
    ("devices", "hip", "expected"),
    [
        (["cuda:1"], "2,3", "3"),
        (["cuda:1", "cuda:0"], "2,3", "3,2"),
        (["cpu"], "2,3", ""),
        (["cuda:1"], "0", "0"),
    ],
)
def test_the_variable_that_hides_the_other_one_says_the_same(devices, hip, expected):
    made = environment(devices, None, {"HIP_VISIBLE_DEVICES": hip})
    assert made["HIP_VISIBLE_DEVICES"] == expected
    assert "HIP_VISIBLE_DEVICES" not in environment(devices, None, {})


def test_cpu_ranks_see_no_gpu():
    assert environment(["cpu", "cpu"], None, {"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == ""
    assert backend_of(["cpu", "cpu"]) == "gloo"


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([], "no devices"),
        (["cpu", "cuda:0"], "cpu, cuda:0"),
        (["tpu:0"], "tpu:0"),
        (["cuda:1", "cuda:1"], "each GPU once"),
        (["cuda:2"], "shows 2"),
    ],
)
def test_devices_that_cannot_form_ranks(devices, words):
    with pytest.raises(UsageError, match=words):
        environment(devices, None, {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_a_listening_port_is_nobody_elses():
    with listening_socket() as listener, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(listener.getsockname())


def test_a_reserved_port_is_given_to_nobody_but_the_one_who_asks_for_it():
    with reserved_port() as port, socket.socket() as rank0:
        held = {port}
        for _ in range(200):
            with reserved_port() as other:
                held.add(other)
                assert other != port
        rank0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank0.bind(("127.0.0.1", port))
        rank0.listen()


def test_the_place_of_a_rank_needs_no_name_service():
    assert rank_variables(1, 3, 4242) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4242",
    }
