"""Descriptions of machines: those that are shipped, and what is none."""

import json
from dataclasses import replace

import pytest

from kway.elsewhere.description import Machine, described, shipped
from kway.errors import UsageError


def test_what_is_shipped():
    assert shipped() == ["64x8xh100", "8xa100", "8xh100"]
    assert [described(name).total for name in shipped()] == [512, 8, 8]


@pytest.mark.parametrize("name", shipped())
def test_each_number_of_a_shipped_description_has_its_source(name):
    machine = described(name)
    tables = {"gpu", "peer", "slot", "host", "software", "reached", "network"}
    for table in tables - ({"network"} if machine.network is None else set()):
        for field in getattr(machine, table):
            own = f"{table}.{field}"
            # One of a pair is named with the other: hop_s and long_hop_s, say.
            named = {own, table, own.replace("long_", ""), own.replace("tree_", "")}
            also = {"software.done_s": "software.launch_s", "peer.over": "peer.bandwidth"}
            assert named & machine.sources.keys() or also.get(own) in machine.sources, own


def test_a_description_of_ones_own(tmp_path):
    own = replace(described("8xh100"), name="mine", gpus=4)
    path = own.save(tmp_path)
    assert path.name == "machine.json"
    assert described(path) == described(str(path)) == described(tmp_path) == own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"gpus": True}, "gpus is True"),
        ({"nodes": 2}, "2 nodes and no network"),
        ({"gpus": 1 << 20}, "at most 16384"),
        ({"peer": {"over": "nvlink"}}, "peer: bandwidth is missing"),
        ({"slot": []}, "slot is a list, not a table of fields"),
    ],
)
def test_what_is_no_description(changes, message):
    with pytest.raises(UsageError, match=message):
        replace(described("8xh100"), **changes)


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("gpu", {"memory_bandwidth": -1.0}, "gpu: memory_bandwidth is -1.0"),
        ("gpu", {"flops": {}}, "gpu.flops has no rate"),
        ("gpu", {"flops": {"fp32": 1e12}}, "gpu.flops has fp32, reached.flops has fp64"),
        ("peer", {"over": "string"}, "peer: over is 'string', not one of nvlink, pcie"),
        ("reached", {"memory": 1.5}, "reached.memory is 1.5: a part of the peak is at most 1"),
        ("software", {"blocks": 132}, "software.blocks is 132 of 132"),
        ("software", {"call_s": float("nan")}, "software: call_s is nan"),
    ],
)
def test_wrong_numbers(table, changes, message):
    machine = described("8xh100")
    with pytest.raises(UsageError, match=message):
        replace(machine, **{table: {**getattr(machine, table), **changes}})


def test_what_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"unknown machine '8xh10'.*did you mean '8xh100'"):
        described("8xh10")
    with pytest.raises(UsageError, match="no file"):
        described("nowhere/machine.json")
    with pytest.raises(UsageError, match="a machine of type int"):
        described(8)
    other = tmp_path / "cluster.json"
    other.write_text(json.dumps({"kind": "cluster", "schema": 1}))
    with pytest.raises(UsageError, match="a record of kind 'cluster', schema 1: this reads 'machine'"):
        described(other)
    assert Machine.kind == "machine"
