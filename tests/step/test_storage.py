"""Complex numbers in files: what is written comes back, and where processors can read it."""

import pytest
import torch
from safetensors.torch import save
from torch import nn

from kway.comm.flat import FlatGradients
from kway.step.storage import read_made, read_tensors, to_bytes


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_come_back_aligned(tmp_path, dtype):
    state = {
        f"{place}{name}": torch.randn(shape, dtype=kind, generator=torch.Generator().manual_seed(0))
        for place in range(4)
        for name, kind, shape in (
            ("a", torch.float32, 3),
            ("b", dtype, ()),
            ("c", torch.float64, 1),
            ("d", dtype, 2),
        )
    }
    (tmp_path / "file").write_bytes(to_bytes(state))
    found = read_tensors(tmp_path / "file")
    assert set(found) == set(state)
    for name, value in state.items():
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype
        if value.is_complex():
            assert found[name].data_ptr() % value.element_size() == 0
            torch.zeros(value.shape, dtype=dtype).copy_(found[name])


@pytest.mark.parametrize("odd", [1, 2, 3])
@pytest.mark.parametrize(
    ("real", "pair"), [(torch.float32, torch.complex64), (torch.float64, torch.complex128)]
)
def test_complex_gradients_lie_aligned_between_real_ones(odd, real, pair):
    shapes = [(odd, real), ((), pair), (1, real), (2, pair), (odd, real)]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
    flat = FlatGradients(parameters, 2)
    expected = []
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, place + (2j if parameter.is_complex() else 0))
        expected.append(parameter.grad.clone())
    flat.collect(torch.tensor([5.0, 6.0]))
    flat.hand_out()
    for parameter, value in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, value)
        assert parameter.grad.data_ptr() % parameter.element_size() == 0
    assert flat.scalars.tolist() == [5.0, 6.0]


def test_what_was_made_is_said_beside_the_complex_ones(tmp_path):
    state = {"a": torch.ones(2, dtype=torch.complex128), "b": torch.ones(1)}
    (tmp_path / "file").write_bytes(to_bytes(state, {"b": "buffer", "gone": "buffer"}))
    assert read_made(tmp_path / "file") == {"b": "buffer"}
    assert torch.equal(read_tensors(tmp_path / "file")["a"], state["a"])
    (tmp_path / "file").write_bytes(save({"b": state["b"]}, {"made": "in June"}))
    assert read_made(tmp_path / "file") == {}
    assert set(read_tensors(tmp_path / "file")) == {"b"}
