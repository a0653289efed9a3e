"""Nested state goes into JSON and tensors and comes back equal: values, dtypes, structure, shared tensors."""

import json
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kway.checkpoints.dtypes import STORED_DTYPES
from kway.checkpoints.durable import DurableFile
from kway.checkpoints.state import flatten, restore
from kway.checkpoints.tensor_file import read_tensors, write_tensors
from kway.errors import UsageError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool,
          torch.complex64, torch.complex128, torch.uint16]  # fmt: skip


def through_disk(state, folder):
    encoded, tensors = flatten(state)
    path = folder / "x.safetensors"
    path.unlink(missing_ok=True)
    file = DurableFile(path)
    with file:
        write_tensors(file, tensors)
    file.close()
    return restore(json.loads(json.dumps(encoded, allow_nan=False)), read_tensors(path))


def same(a, b):
    """Equal to the last bit and of the same kind, NaN being equal to itself; dicts in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        layout = (a.dtype, a.shape) == (b.dtype, b.shape)
        return layout and as_bytes(a) == as_bytes(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def as_bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=5),
    st.complex_numbers(), st.binary(max_size=4), st.sampled_from(["$", "a/b", "__metadata__", "\ud800", ""]),
)  # fmt: skip
keys = st.one_of(st.integers(), st.text(max_size=3), st.sampled_from(["$", "a/b", "__metadata__", "\ud800", ""]),
                 st.none(), st.floats(allow_nan=False), st.tuples(st.integers(), st.text(max_size=2)))  # fmt: skip
states = st.recursive(
    st.one_of(scalars, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(state=states)
def test_any_state_comes_back_equal(state, tmp_path_factory):
    assert same(through_disk(state, tmp_path_factory.mktemp("state")), state)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(STORED_DTYPES, key=str), ids=str)
def test_every_dtype_and_shape(dtype, tmp_path):
    def filled(shape):
        count = math.prod(shape) * dtype.itemsize
        content = (
            torch.arange(count, dtype=torch.uint8)
            if dtype != torch.bool
            else torch.ones(count, dtype=torch.uint8)
        )
        return content.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)

    state = {str(shape): [filled(shape)] for shape in [(), (3, 2), (0, 2), (1,)]}
    assert same(through_disk(state, tmp_path), state)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_dtype_of_torch_is_stored_or_refused_by_name():
    for name in dir(torch):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or dtype in STORED_DTYPES:
            continue
        try:
            tensor = torch.empty(2, dtype=dtype)
        except (RuntimeError, NotImplementedError):
            continue
        with pytest.raises(UsageError, match=r"^state\['t'\] is a"):
            flatten({"t": tensor})


def test_an_optimizer_state_of_torch_with_its_integer_keys(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    back = through_disk(state, tmp_path)
    assert same(back, state)
    assert [type(key) for key in back["state"]] == [int, int]
    assert back["param_groups"][0]["betas"] == (0.9, 0.999)


def test_numpy_numbers_and_arrays_keep_their_kind(tmp_path):
    state = {
        "key": np.random.default_rng(3).integers(0, 2**32, 5, dtype=np.uint32), "lr": np.float32(0.1),
        "n": np.int64(-4), "flag": np.bool_(True), "c": np.complex64(1 + 2j), "t": np.arange(6.0).reshape(2, 3).T,
        "nan": np.float64("nan"), "zero": np.array(5), "none": np.empty((0, 2), np.int8),
    }  # fmt: skip
    assert same(through_disk(state, tmp_path), {**state, "t": np.ascontiguousarray(state["t"])})


def test_the_state_of_generators_of_python_and_numpy_comes_back(tmp_path):
    import random

    generator = random.Random(5)
    state = {"python": generator.getstate(), "numpy": np.random.RandomState(5).get_state(legacy=False)}
    back = through_disk(state, tmp_path)
    first = generator.random()
    generator.setstate(back["python"])
    assert generator.random() == first
    other = np.random.RandomState(1)
    other.set_state(back["numpy"])
    assert other.rand() == np.random.RandomState(5).rand()


def test_shared_tensors_are_stored_once_and_tied_again(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "b": [weight, weight.view(2, 3)], "t": weight.T, "part": weight[0]}
    encoded, held = flatten(state)
    assert sorted(held) == ["a", "part", "t"]
    assert encoded["b"][0]["name"] == "a"
    back = through_disk(state, tmp_path)
    assert back["a"] is back["b"][0] is back["b"][1]
    back["a"].zero_()
    assert back["b"][1].sum() == 0
    assert torch.equal(back["t"], torch.arange(6.0).reshape(2, 3).T)
    assert torch.equal(back["part"], torch.arange(3.0))


def test_empty_tensors_of_one_address_are_not_taken_for_one(tmp_path):
    state = [torch.empty(0, 3), torch.empty(0, dtype=torch.int8), torch.empty(2, 0)]
    assert same(through_disk(state, tmp_path), state)


def test_the_order_in_memory_comes_back(tmp_path):
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = [last, last, torch.ones(3, 1).expand(3, 4), torch.arange(12.0).reshape(3, 4)[:, ::2]]
    back = through_disk(state, tmp_path)
    assert back[0].stride() == last.stride()
    assert back[0] is back[1]
    assert all(map(torch.equal, back, state))


def test_conjugates_and_negatives_that_are_not_computed_yet(tmp_path):
    number = torch.tensor([1 + 2j, 3 - 1j])
    back = through_disk({"z": number.conj(), "im": number.conj().imag, "same": number}, tmp_path)
    assert back["z"].tolist() == [1 - 2j, 3 + 1j]
    assert back["im"].tolist() == [-2.0, 1.0]
    assert back["same"].tolist() == [1 + 2j, 3 - 1j]


def test_names_say_where_a_tensor_lies():
    _, held = flatten({"layer.weight": {"exp_avg": torch.ones(1)}, 0: (torch.ones(1),)})
    assert sorted(held) == ["0/0", "layer.weight/exp_avg"]


def test_ways_that_read_alike_get_names_apart(tmp_path):
    state = {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1), 1: torch.tensor(1), "1": torch.tensor(2)}
    assert same(through_disk(state, tmp_path), state)


class Custom:
    pass


def cycle():
    inner: list = [1]
    inner.append({"again": inner})
    return inner


def deep():
    state: list = []
    for _ in range(150):
        state = [state]
    return state


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"optimizer": {"layer": [0, Custom()]}}, r"state\['optimizer'\]\['layer'\]\[1\] is a .*Custom"),
        ({"f": (1, lambda: 0)}, r"state\['f'\]\[1\] is a builtins.function"),
        ({"s": {1, 2}}, r"state\['s'\] is a builtins.set"),
        ({"o": np.array([None])}, r"state\['o'\] is a numpy.ndarray"),
        ({"d": torch.float32}, r"state\['d'\] is a torch.dtype"),
        ({"g": torch.Generator()}, r"state\['g'\] is a torch.*Generator"),
        ([torch.ones(2, device="meta")], r"state\[0\] is a tensor on the meta device"),
        ([torch.eye(2).to_sparse_csr()], r"state\[0\] is a tensor of layout torch.sparse_csr"),
        ({Custom: 1}, r"the key .* of state is a builtins.type"),
        ({torch.ones(1): 1}, r"state has a tensor as a key"),
        ({"c": cycle()}, r"state\['c'\]\[1\]\['again'\] contains itself"),
        (deep(), r"lies 100 levels deep"),
    ],
)
def test_what_cannot_be_stored_names_its_place(state, place):
    with pytest.raises(UsageError, match=place):
        flatten(state)


def test_what_a_subclass_of_a_tensor_would_lose_is_refused():
    class Scaled(torch.Tensor):
        pass

    with pytest.raises(UsageError, match=r"state\['x'\] is a .*Scaled"):
        flatten({"x": torch.ones(2).as_subclass(Scaled)})


def test_the_deepest_state_that_is_taken_can_be_written_and_read(tmp_path):
    state: dict = {"t": torch.ones(1)}
    for _ in range(98):
        state = {"in": state}
    assert same(through_disk(state, tmp_path), state)


@pytest.mark.parametrize("encoded", [{"$": "object"}, {"$": "tensor", "name": "gone"}, {"$": "tuple"},
                                     {"$": "number", "dtype": "O", "value": 1}, {"$": []}])  # fmt: skip
def test_what_flatten_never_wrote_is_one_error(encoded):
    with pytest.raises(UsageError, match="cannot be put together"):
        restore({"a": [encoded]}, {})


def test_parameters_come_back_as_plain_tensors(tmp_path):
    back = through_disk({"p": nn.Parameter(torch.ones(2))}, tmp_path)
    assert type(back["p"]) is torch.Tensor
    assert not back["p"].requires_grad


@pytest.mark.parametrize("coalesced", [True, False])
def test_a_sparse_tensor_comes_back_entry_by_entry(tmp_path, coalesced):
    entries = torch.tensor([[2, 0, 2]]), torch.tensor([[1.0, 2.0], [0.0, 0.0], [1e-8, 3.0]])
    sparse = torch.sparse_coo_tensor(*entries, (4, 2), check_invariants=True)
    sparse = sparse.coalesce() if coalesced else sparse
    back = through_disk({"m": sparse}, tmp_path)["m"]
    assert back.is_coalesced() == coalesced
    assert back.shape == sparse.shape
    assert torch.equal(back._indices(), sparse._indices())
    assert torch.equal(back._values(), sparse._values())
