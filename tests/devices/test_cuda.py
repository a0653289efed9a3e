# ruff: noqa: N802 - the fake has the names of the package that it stands in for
import types

import pytest

from kway.devices.cuda import NO_DRIVER, read


class NotSupportedError(Exception):
    pass


class FakeNvml:
    """Two GPUs on one board; ``broken`` names the questions that this driver refuses."""

    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, broken=(), far="direct", p2p=(0, 0, 0), ancestor=30, lost=()):
        self.broken, self.far, self.p2p, self.ancestor, self.lost = broken, far, p2p, ancestor, lost
        self.open = 0

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            raise NotSupportedError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return b"570.1"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12080

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.lost:
            raise NotSupportedError("lost")
        return index

    def nvmlDeviceGetName(self, handle):
        return "Card"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(total=100, free=90 + handle)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return 9, 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, slot):
        if slot:
            raise NotSupportedError("empty")
        return f"{handle}m"

    def nvmlDeviceGetPciInfo(self, handle):
        return types.SimpleNamespace(busId=f"0000:0{handle}:00.a")

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link == 3:
            raise NotSupportedError("no such link")
        return int(link < 2 + handle and self.far != "none")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 2 if self.far == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        if self.far == "switch":
            return types.SimpleNamespace(busId="0000:FF:00.0")
        return types.SimpleNamespace(busId=f"0000:0{1 - handle}:00.A")

    def nvmlDeviceGetP2PStatus(self, first, second, kind):
        return self.p2p[kind]

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        return self.ancestor


def ask(nvml):
    return read(present=lambda: True, load=lambda: nvml)


def test_everything_answers():
    nvml = FakeNvml()
    driver = ask(nvml)
    assert driver.version == "570.1"
    assert driver.problem == ""
    assert driver.gpus[1] == {
        "physical": 1,
        "name": "Card",
        "uuid": "GPU-1",
        "memory_total": 100,
        "memory_free": 91,
        "compute_capability": "9.0",
        "bus": "0000:01:00.A",
        "mig": ["GPU-1m"],
    }
    assert driver.cuda == "12.8"
    assert driver.links == [{"a": 0, "b": 1, "peer": True, "over": "nvlink", "nvlinks": 2}]
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (FakeNvml(far="switch"), (True, "nvlink", 2)),
        (FakeNvml(far="none"), (True, "nvlink", None)),
        (FakeNvml(far="none", p2p=(0, 0, 5)), (True, "host-bridge", None)),
        (FakeNvml(p2p=(0, 0, 5), ancestor=10), (True, "pcie-switch", None)),
        (FakeNvml(p2p=(1, 1, 5), ancestor=50), (False, "sockets", None)),
        (FakeNvml(p2p=(0, 5, 5), ancestor=20), (False, "pcie-switches", None)),
        (FakeNvml(p2p=(0, 0, 5), ancestor=99), (True, "unknown", None)),
        (FakeNvml(broken=["nvmlDeviceGetP2PStatus"]), (None, "nvlink", 2)),
        (FakeNvml(broken=["nvmlDeviceGetP2PStatus"], far="none", ancestor=40), (None, "numa-node", None)),
        (FakeNvml(broken=["nvmlDeviceGetPciInfo"]), (True, "nvlink", None)),
        (FakeNvml(lost=[1]), (None, "unknown", None)),
    ],
)
def test_links(fake, expected):
    (link,) = ask(fake).links
    assert (link["peer"], link["over"], link["nvlinks"]) == expected


@pytest.mark.parametrize("question", [name for name in dir(FakeNvml) if name.startswith("nvml")])
def test_any_single_refusal_costs_one_fact(question):
    whole, partial = ask(FakeNvml()), ask(FakeNvml(broken=[question]))
    if question == "nvmlInit":
        assert "does not answer: nvmlInit" in partial.problem
        assert partial.gpus == []
        return
    if question == "nvmlDeviceGetCount":
        assert partial.problem == "the NVIDIA driver lists no GPU"
        return
    assert len(partial.gpus) == 2
    assert [gpu["physical"] for gpu in partial.gpus] == [0, 1]
    assert partial.cuda == (None if "CudaDriver" in question else "12.8")
    missing = {
        "nvmlDeviceGetName": {"name": "unknown"},
        "nvmlDeviceGetUUID": {"uuid": None, "mig": []},
        "nvmlDeviceGetMemoryInfo": {"memory_total": None, "memory_free": None},
        "nvmlDeviceGetCudaComputeCapability": {"compute_capability": None},
        "nvmlDeviceGetPciInfo": {"bus": None},
        "nvmlDeviceGetMaxMigDeviceCount": {"mig": []},
        "nvmlDeviceGetMigDeviceHandleByIndex": {"mig": []},
    }
    if question == "nvmlDeviceGetHandleByIndex":
        assert partial.gpus[0]["name"] == "unknown"
    else:
        assert partial.gpus[0] == {**whole.gpus[0], **missing.get(question, {})}


def test_no_driver_and_no_package():
    assert read(present=lambda: False).problem == NO_DRIVER

    def missing():
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert "nvidia-ml-py is not" in read(present=lambda: True, load=missing).problem


def test_names_used_exist_in_the_real_package():
    real = pytest.importorskip("pynvml")
    questions = [name for name in dir(FakeNvml) if name.startswith("nvml")]
    assert [name for name in questions if not hasattr(real, name)] == []
    assert real.NVML_P2P_CAPS_INDEX_NVLINK == 2
    assert real.NVML_P2P_STATUS_OK == 0
    assert real.NVML_NVLINK_DEVICE_TYPE_SWITCH == 2
    assert real.NVML_TOPOLOGY_HOSTBRIDGE == 30
