import pytest
from tests.devices.system_tree import planted

from kway.devices.networks import between_cpus, between_gpus, infiniband, interfaces

NODE = {
    "sys/class/infiniband/mlx5_0/fw_ver": "28.39.1002",
    "sys/class/infiniband/mlx5_0/device/numa_node": "1",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "sys/class/infiniband/mlx5_10/ports/1/link_layer": "Ethernet",
    "sys/class/infiniband/mlx5_10/ports/1/state": "1: DOWN",
    "sys/class/infiniband/mlx5_10/ports/1/rate": "2.5 Gb/sec (1X SDR)",
    "sys/class/infiniband/mlx5_2/ports/1/rate": "unreadable",
    "sys/class/net/lo/type": "772",
    "sys/class/net/lo/operstate": "up",
    "sys/class/net/eth0/type": "1",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "25000",
    "sys/class/net/eth1/type": "1",
    "sys/class/net/eth1/operstate": "down",
    "sys/class/net/ib0/type": "32",
    "sys/class/net/ib0/operstate": "up",
    "sys/class/net/ib0/speed": "-1",
    "sys/class/net/ib0/device/numa_node": "0",
}


def test_ports_of_infiniband_adapters(tmp_path):
    first, bare, converged = infiniband(planted(tmp_path, NODE))
    assert first == {
        "device": "mlx5_0",
        "port": 1,
        "layer": "InfiniBand",
        "state": "ACTIVE",
        "bits_s": 400 * 10**9,
        "rate": "400 Gb/sec (4X NDR)",
        "firmware": "28.39.1002",
        "numa_node": 1,
    }
    assert (bare["device"], bare["layer"], bare["state"], bare["bits_s"]) == (
        "mlx5_2",
        "unknown",
        "unknown",
        None,
    )
    assert (converged["device"], converged["layer"], converged["state"]) == ("mlx5_10", "Ethernet", "DOWN")
    assert converged["bits_s"] == 2_500_000_000


def test_interfaces_that_are_up_and_reach_others(tmp_path):
    assert interfaces(planted(tmp_path, NODE)) == [
        {"name": "eth0", "kind": "Ethernet", "bits_s": 25 * 10**9, "numa_node": None},
        {"name": "ib0", "kind": "IP over InfiniBand", "bits_s": None, "numa_node": 0},
    ]


def test_a_machine_alone(tmp_path):
    assert infiniband(tmp_path) == interfaces(tmp_path) == []
    assert between_gpus({}, []) == between_cpus({}, []) == "Ethernet"


def port(**changes):
    return {"layer": "InfiniBand", "state": "ACTIVE", **changes}


@pytest.mark.parametrize(
    ("environ", "ports", "expected"),
    [
        ({}, [port(state="DOWN"), port()], "InfiniBand"),
        ({}, [port(state="DOWN")], "Ethernet"),
        ({}, [port(layer="Ethernet")], "Ethernet"),
        ({"NCCL_IB_DISABLE": "1"}, [port()], "Ethernet"),
        ({"NCCL_IB_DISABLE": "0"}, [port()], "InfiniBand"),
    ],
)
def test_what_gpus_take_between_machines(environ, ports, expected):
    assert between_gpus(environ, ports) == expected


ETH, IB = {"name": "eth0", "kind": "Ethernet"}, {"name": "ib0", "kind": "IP over InfiniBand"}


@pytest.mark.parametrize(
    ("named", "found", "expected"),
    [
        (None, [ETH, IB], "Ethernet"),
        ("ib0", [ETH, IB], "IP over InfiniBand"),
        ("eth0,ib0", [ETH, IB], "Ethernet"),
        ("gone", [IB], "IP over InfiniBand"),
        (None, [IB], "IP over InfiniBand"),
    ],
)
def test_what_cpus_take_between_machines(named, found, expected):
    assert between_cpus({} if named is None else {"GLOO_SOCKET_IFNAME": named}, found) == expected
