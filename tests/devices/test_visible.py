import pytest

from kway.devices.visible import visible

NAMES = ("GPU-11111111-a", "GPU-22222222-b", "GPU-22333333-c", "GPU-44444444-d")


def gpus(count, names=None):
    return [
        {"uuid": NAMES[i], "name": names[i] if names else "card", "mig": [f"MIG-{i}x", f"MIG-{i}y"]}
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("value", "none", "two", "four"),
    [
        (None, [], [0, 1], [0, 1, 2, 3]),
        ("", [], [], []),
        ("-1", [], [], []),
        ("3", [], [], [3]),
        ("0,9", [], [0], [0]),
        ("9,0", [], [], []),
        ("1,1", [], [], []),
        ("1,0", [], [1, 0], [1, 0]),
        (" 1 , 0 ", [], [1, 0], [1, 0]),
        ("1,-1,0", [], [1], [1]),
        ("0,x,1", [], [0], [0]),
        ("1x,0", [], [1, 0], [1, 0]),
        ("0,1,", [], [0, 1], [0, 1]),
        ("NoDevFiles", [], [], []),
        ("GPU-22222222-b,GPU-11111111-a", [], [1, 0], [1, 0]),
        ("GPU-1", [], [0], [0]),
        ("GPU-4", [], [], [3]),
        ("GPU-1,GPU-11111111-a", [], [], []),
        ("MIG-1y", [], [1], [1]),
        ("MIG-GPU-11111111-a/1/0", [], [0], [0]),
    ],
)
def test_values(value, none, two, four):
    assert [visible(value, gpus(n)).physical for n in (0, 2, 4)] == [none, two, four]


def test_prefix_has_to_be_unique():
    assert visible("GPU-22", gpus(2)).physical == [1]
    found = visible("GPU-22", gpus(4))
    assert found.physical == []
    assert "fits 2 GPUs" in found.warnings[0]


@pytest.mark.parametrize("value", [None, "", "-1", "0", "1,0", "GPU-11111111-a"])
def test_plain_values_do_not_warn(value):
    assert visible(value, gpus(2)).warnings == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("1,1", "repeats a GPU"),
        ("0,9", "there is no GPU 9, the driver has 2 GPUs"),
        ("0,x", "neither an index nor a UUID"),
        ("GPU-9", "no GPU has the UUID"),
        ("MIG-none", "no MIG instance"),
        ("MIG-0x,MIG-1x", "one MIG instance"),
    ],
)
def test_surprises_warn(value, words):
    (warning,) = visible(value, gpus(2)).warnings
    assert words in warning
    assert f"CUDA_VISIBLE_DEVICES={value}" in warning


def test_order_matters_only_for_different_models():
    mixed = gpus(2, ["big", "small"])
    assert visible("1", gpus(2)).warnings == []
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in visible("1", mixed).warnings[0]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in visible("1", mixed, "FASTEST_FIRST").warnings[0]
    assert visible("1", mixed, "PCI_BUS_ID").warnings == []
    assert visible("GPU-11111111-a", mixed).warnings == []


def test_gpus_without_uuid_cannot_be_named_by_one():
    assert visible("GPU-1", [{"uuid": None, "name": "card"}]).physical == []
    assert visible("0", [{"uuid": None, "name": "card"}]).physical == [0]
