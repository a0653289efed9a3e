import pytest
import torch
from safetensors import safe_open
from torch import nn

from kway.step.storage import read_tensors
from kway.training.weights import fingerprint, save_weights, unique_names


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 4, bias=False)
        self.embedding = nn.Embedding(4, 3)
        self.out.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_tied_tensors_are_named_once_and_views_are_not_ties():
    names = unique_names(Tied())
    assert names == sorted(names)
    assert "embedding.weight" in names
    assert "out.weight" not in names
    assert len(names) == 6
    model = nn.Module()
    whole = torch.zeros(4)
    model.register_buffer("a", whole[:2])
    model.register_buffer("b", whole[2:])
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("nothing", torch.zeros(0))
    assert unique_names(model) == ["a", "b", "empty", "nothing"]


def test_a_fingerprint_sees_names_values_shapes_and_dtypes():
    state = {"a": torch.zeros(2, 3), "b": torch.ones(2, dtype=torch.complex64)}
    names = ["a", "b"]
    whole = fingerprint(state, names)
    assert len(whole) == 64
    assert fingerprint({name: value.clone() for name, value in state.items()}, names) == whole
    strided = torch.zeros(3, 2).t()
    assert fingerprint({**state, "a": strided}, names) == whole
    others = [
        {**state, "a": torch.zeros(3, 2)},
        {**state, "a": torch.zeros(2, 3, dtype=torch.int32)},
        {**state, "a": -torch.zeros(2, 3)},
        {**state, "b": torch.ones(2, dtype=torch.complex64) * 1j},
    ]
    assert len({whole, *(fingerprint(other, names) for other in others)}) == 5
    assert fingerprint({"c": state["a"], "b": state["b"]}, ["c", "b"]) != whole


def test_files_hold_every_name_and_nothing_of_the_run(tmp_path):
    torch.manual_seed(0)
    state = state_of(Tied())
    save_weights(state, tmp_path / "a.safetensors")
    save_weights(dict(reversed(state.items())), tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(state)
        assert not file.metadata()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.bool]
)
def test_every_dtype_comes_back(tmp_path, dtype):
    state = {"x": torch.tensor([[1, 0], [2, 3]]).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    if dtype.is_complex:
        state["conjugate"] = (state["x"] * 1j).conj()
    save_weights(state, tmp_path / "w.safetensors")
    found = read_tensors(tmp_path / "w.safetensors")
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], value)
