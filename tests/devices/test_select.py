import pytest
import torch

from kway.devices.select import parse, parse_list, spelled, warnings
from kway.devices.simulated import simulated
from kway.errors import UsageError

BARE = simulated(cores=4)
TWO = simulated(gpus=2, cores=4)
FOUR = simulated(gpus=4, cores=4)


@pytest.mark.parametrize(
    ("spec", "on_cpu", "on_two"),
    [
        ("auto", ["cpu"], ["cuda:0", "cuda:1"]),
        ("1", ["cpu"], ["cuda:0"]),
        (2, ["cpu", "cpu"], ["cuda:0", "cuda:1"]),
        (" 2 ", ["cpu", "cpu"], ["cuda:0", "cuda:1"]),
        ("cpu", ["cpu"], ["cpu"]),
        ("cpu:3", ["cpu"] * 3, ["cpu"] * 3),
    ],
)
def test_sets(spec, on_cpu, on_two):
    assert parse(spec, BARE) == on_cpu
    assert parse(spec, TWO) == on_two


def test_gpus_by_index_keep_their_order():
    assert parse("cuda", FOUR) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert parse("cuda:3,1", FOUR) == ["cuda:3", "cuda:1"]
    assert parse("cuda:1", TWO) == ["cuda:1"]


def test_indices_are_those_that_torch_counts():
    assert parse("cuda", simulated(gpus=4, visible="3,1")) == ["cuda:0", "cuda:1"]
    with pytest.raises(UsageError, match="no cuda:3"):
        parse("cuda:3", simulated(gpus=4, visible="3,1"))


@pytest.mark.parametrize(
    ("spec", "cluster", "words"),
    [
        ("0", BARE, "'0' asks for 0 devices: at least 1"),
        (0, TWO, "asks for 0 devices"),
        ("-2", BARE, "asks for -2 devices"),
        ("cpu:0", BARE, "asks for 0 devices"),
        ("cpu:-1", TWO, "asks for -1 devices"),
        ("", BARE, "device set ''"),
        ("many", BARE, "auto, N, cpu, cpu:N, cuda or cuda:I,J"),
        ("1.5", BARE, "'1.5'"),
        ("²", BARE, "device set"),
        (1.5, BARE, "1.5"),
        (True, TWO, "True"),
        (None, TWO, "None"),
        ("cpu:", BARE, "'cpu:'"),
        ("cpu:two", BARE, "'cpu:two'"),
        ("gpu:0", TWO, "'gpu:0'"),
        ("auto:2", TWO, "'auto:2'"),
        ("cuda:2", TWO, "no cuda:2: this machine shows 2 (cuda:0, cuda:1)"),
        ("cuda:0,7", TWO, "no cuda:7"),
        ("cuda:1,0,1", TWO, "lists cuda:1 twice"),
        ("cuda:0-3", FOUR, "'0-3' is not the index of a GPU"),
        ("cuda:", FOUR, "'' is not the index"),
        ("cuda:0,", FOUR, "'' is not the index"),
        ("cuda:-1", FOUR, "'-1' is not the index"),
        ("4", TWO, "needs 4 devices, this machine shows 2 (cuda:0, cuda:1): use --devices 2"),
        ("cuda", BARE, "needs a GPU: no GPU can be used (no NVIDIA driver was found)"),
        ("cuda:0", simulated(gpus=2, torch_cuda=None), "built without CUDA"),
        ("cuda", simulated(gpus=2, visible="-1"), "CUDA_VISIBLE_DEVICES=-1 hides all 2 GPUs"),
    ],
)
def test_bad_sets(spec, cluster, words):
    with pytest.raises(UsageError) as caught:
        parse(spec, cluster)
    assert words in str(caught.value)


def test_hidden_gpus_leave_the_cpu():
    assert parse("2", simulated(gpus=2, visible="")) == ["cpu", "cpu"]
    assert parse("auto", simulated(gpus=2, torch_cuda=None)) == ["cpu"]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1,2,3", [1, 2, 3]),
        ("1 2 4", [1, 2, 4]),
        ("1,2 4", [1, 2, 4]),
        ("1,cpu", [1, 1]),
        (3, [3]),
        ([1, "2,4", "cpu:3"], [1, 2, 4, 3]),
        (("cpu",), [1]),
        ("cpu:2 cuda:0,1", [2, 2]),
    ],
)
def test_lists(text, sizes):
    assert [len(devices) for devices in parse_list(text, FOUR)] == sizes


def test_commas_inside_a_set_belong_to_it():
    assert parse_list("cpu:2 cuda:0,1 auto", TWO) == [
        ["cpu", "cpu"],
        ["cuda:0", "cuda:1"],
        ["cuda:0", "cuda:1"],
    ]


@pytest.mark.parametrize("text", ["", "  ", [], "1,,2", "cpu:1,cpu:2", "1,cpu:2", "1,0", True, [None]])
def test_bad_lists(text):
    with pytest.raises(UsageError):
        parse_list(text, FOUR)


def test_what_is_no_set_is_named_alone_and_told_how_several_are_written():
    with pytest.raises(UsageError, match=r"^device set 'x': a device set is auto.*several are .* 1,2,3 or"):
        parse_list("1,x", FOUR)
    with pytest.raises(UsageError, match=r"asks for 0 devices: at least 1 is needed$"):
        parse_list("1,0", FOUR)


def test_more_ranks_than_cores():
    assert warnings(["cpu"] * 4, BARE) == []
    (line,) = warnings(["cpu"] * 5, BARE)
    assert "5 CPU ranks share 4 usable cores" in line
    assert "1 usable core:" in warnings(["cpu", "cpu"], simulated(cores=1))[0]
    assert warnings(["cuda:0", "cuda:1"], simulated(gpus=2, cores=1)) == []


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ("cpu", "cpu:1"),
        ("cpu:0", "cpu:1"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        (["cpu", "cpu"], "cpu:2"),
        (["cuda:1", "cuda:0"], "cuda:1,0"),
    ],
)
def test_devices_of_torch(devices, text):
    given = [torch.device(name) for name in devices] if isinstance(devices, list) else torch.device(devices)
    assert spelled(given) == text
    assert parse(given, FOUR) == parse(text, FOUR)
    # To a proof, a list of them is one set, and a list of lists is several.
    assert parse_list(given, FOUR) == [parse(text, FOUR)]
    assert parse_list([given, 2], FOUR) == [parse(text, FOUR), parse(2, FOUR)]


@pytest.mark.parametrize(
    "devices", [[torch.device("cpu"), torch.device("cuda:0")], torch.device("meta"), torch.float32, [], None]
)
def test_what_is_no_set_of_devices_of_torch(devices):
    with pytest.raises(UsageError, match=r"^device set"):
        parse(devices, FOUR)
    with pytest.raises(UsageError, match=r"^(no )?device set"):
        parse_list(devices, FOUR)


def test_several_sets_may_come_as_any_sequence():
    assert parse_list(range(1, 3), TWO) == parse_list([1, 2], TWO) == parse_list("1,2", TWO)
