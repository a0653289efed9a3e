import json

import pytest

from kway.devices import mps
from kway.devices.mps import attributes, read

BUILD = {"version": "2.13"}
# What an Apple computer prints, shortened.
DISPLAYS = json.dumps(
    {
        "SPDisplaysDataType": [
            {
                "_name": "kHW_AppleM1ProItem",
                "spdisplays_mtlgpufamilysupport": "spdisplays_metal3",
                "spdisplays_vendor": "sppci_vendor_Apple",
                "sppci_bus": "spdisplays_builtin",
                "sppci_cores": "16",
                "sppci_device_type": "spdisplays_gpu",
                "sppci_model": "Apple M1 Pro",
            }
        ]
    }
)


class Mac(mps.Host):
    system = "darwin"

    def __init__(self, machine="arm64", version="15.2", displays=DISPLAYS):
        self.machine, self._version, self._displays = machine, version, displays

    def version(self):
        return self._version

    def output(self, command):
        return {mps.NAME: "Apple M1 Pro\n", mps.MEMORY: "34359738368\n", mps.DISPLAYS: self._displays}[
            command
        ]


def test_an_apple_computer():
    found = read(BUILD, Mac())
    assert found == {
        "name": "Apple M1 Pro",
        "memory_total": 32 << 30,
        "usable": True,
        "why": mps.NO_COLLECTIVES,
    }
    assert attributes(Mac()) == {"model": "Apple M1 Pro", "gpu_cores": 16, "metal": "3"}


@pytest.mark.parametrize("displays", ["", "{}", "[]", '{"SPDisplaysDataType": [{"_name": "x"}]}', "not json"])
def test_displays_that_tell_nothing(displays):
    assert attributes(Mac(displays=displays)) == {}


@pytest.mark.parametrize(
    ("host", "build", "why"),
    [
        (Mac(machine="x86_64"), BUILD, "this machine is x86_64"),
        (Mac(version="13.7.4"), BUILD, "macOS 13.7.4 is older than 14.0"),
        (Mac(), {"version": None}, "torch is not installed"),
    ],
)
def test_why_torch_cannot_use_it(host, build, why):
    found = read(build, host)
    assert not found["usable"]
    assert why in found["why"]


def test_other_machines_have_none():
    host = Mac()
    host.system = "linux"
    assert read(BUILD, host) is None
    assert attributes(host) == {}


def test_a_command_that_is_not_there_says_nothing():
    assert mps.Host().output(("no-such-command-anywhere",)) == ""
