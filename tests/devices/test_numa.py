import pytest
from tests.devices.system_tree import planted

from kway.devices.numa import nodes, of_bus

TWO = {
    "sys/devices/system/node/node0/cpulist": "0-3,8-11",
    "sys/devices/system/node/node0/distance": "10 21",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       1024 kB\nNode 0 MemFree:   10 kB",
    "sys/devices/system/node/node1/cpulist": "4-7,12-15",
    "sys/devices/system/node/node1/distance": "21 10",
    "sys/devices/system/node/node10/cpulist": "",
    "sys/devices/system/node/possible": "0-10",
    "sys/bus/pci/devices/0000:1b:00.0/numa_node": "1",
    "sys/bus/pci/devices/10000:02:00.0/numa_node": "0",
    "sys/bus/pci/devices/0000:03:00.0/numa_node": "-1",
}


def test_nodes_in_order_with_processors_memory_and_distances(tmp_path):
    first, second, third = nodes(planted(tmp_path, TWO))
    assert first == {
        "node": 0, "processors": "0-3,8-11", "count": 8, "memory_total": 1 << 20, "distances": [10, 21]
    }  # fmt: skip
    assert (second["node"], second["count"], second["memory_total"]) == (1, 8, None)
    assert (third["node"], third["count"], third["distances"]) == (10, 0, [])


def test_a_system_without_nodes(tmp_path):
    assert nodes(tmp_path) == []


@pytest.mark.parametrize(
    ("bus", "node"),
    [
        ("00000000:1B:00.0", 1),
        ("0000:1b:00.0", 1),
        ("00010000:02:00.0", 0),
        ("0000:03:00.0", None),
        ("0000:77:00.0", None),
        ("nonsense", None),
        (None, None),
    ],
)
def test_node_of_a_pci_device(tmp_path, bus, node):
    assert of_bus(bus, planted(tmp_path, TWO)) == node
