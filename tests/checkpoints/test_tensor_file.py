"""Files are safetensors files that the library reads, the same bytes for the same tensors."""

import hashlib
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from kway.checkpoints.durable import DurableFile
from kway.checkpoints.tensor_file import read_tensors, write_tensors
from kway.errors import UsageError
from kway.step.storage import read_tensors as read_weights


def write(path, tensors):
    file = DurableFile(path)
    with file:
        write_tensors(file, tensors)
    file.close()
    return file.sum


def test_the_library_reads_what_is_written(tmp_path):
    tensors = {
        "b": torch.arange(6, dtype=torch.int16).reshape(2, 3), "a": torch.randn(4, 5, dtype=torch.float64).T,
        "0-dim": torch.tensor(2.5), "none": torch.empty(0, 3), "half": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False]), "z": torch.randn(2, dtype=torch.complex64), "ünï": torch.ones(1),
    }  # fmt: skip
    write(tmp_path / "x.safetensors", tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_what_the_library_wrote_is_read(tmp_path):
    save_file({"w": torch.arange(4.0)}, tmp_path / "x.safetensors")
    assert read_tensors(tmp_path / "x.safetensors")["w"].tolist() == [0, 1, 2, 3]


def test_complex_numbers_of_128_bits_are_read_as_in_files_of_weights(tmp_path):
    tensors = {"z": torch.randn(3, dtype=torch.complex128), "r": torch.ones(1)}
    write(tmp_path / "x.safetensors", tensors)
    assert torch.equal(read_weights(tmp_path / "x.safetensors")["z"], tensors["z"])


def test_the_bytes_depend_on_names_and_tensors_alone(tmp_path):
    a, b = torch.randn(3), torch.arange(5)
    one = write(tmp_path / "one", {"a": a, "b": b})
    two = write(tmp_path / "two", {"b": b.clone(), "a": a.clone()})
    content = (tmp_path / "one").read_bytes()
    assert content == (tmp_path / "two").read_bytes()
    assert one == two
    assert (one.size, one.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_tensors_lie_at_multiples_of_their_numbers_size(tmp_path):
    tensors = {
        f"{i}": torch.ones(i, dtype=d) for i, d in enumerate((torch.int8, torch.float64, torch.half) * 3)
    }
    write(tmp_path / "x.safetensors", tensors)
    content = (tmp_path / "x.safetensors").read_bytes()
    header = int.from_bytes(content[:8], "little")
    assert (header + 8) % 64 == 0
    sizes = {"I8": 1, "F64": 8, "F16": 2}
    for dtype, start in re.findall(rb'"dtype":"(\w+)".*?"data_offsets":\[(\d+),', content[8 : 8 + header]):
        assert int(start) % sizes[dtype.decode()] == 0


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", 3])
def test_a_name_that_no_file_can_hold_is_refused(name, tmp_path):
    with pytest.raises(UsageError, match="as the name of a tensor"):
        write(tmp_path / "x", {name: torch.ones(1)})


@pytest.mark.parametrize("content", [b"", b"garbage that is long enough", b"\x08" + bytes(7) + b'{"a": 1}'])
def test_a_file_of_another_kind_is_one_error(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match="x is not a safetensors file"):
        read_tensors(tmp_path / "x")


FOREIGN = [{"complex128": text} for text in ("x", "5", '["w"]', '["other"]', "[[]]", "[" * 20_000, "null")]


@pytest.mark.parametrize("metadata", [*FOREIGN, *({"bytes": text} for text in ("5", "[]]", '{"w": 5}'))])
def test_metadata_that_means_something_else_is_one_error(metadata, tmp_path):
    save_file({"w": torch.arange(3)}, tmp_path / "x", metadata)
    with pytest.raises(UsageError, match="x is not a safetensors file of kway") as caught:
        read_tensors(tmp_path / "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("metadata", FOREIGN)
def test_metadata_of_weights_that_means_something_else_is_one_error(metadata, tmp_path):
    save_file({"w": torch.arange(3)}, tmp_path / "x", metadata)
    with pytest.raises(UsageError, match="x has 'complex128' in its metadata") as caught:
        read_weights(tmp_path / "x")
    assert "\n" not in str(caught.value)


def test_a_large_tensor_is_hashed_and_written_piece_by_piece(tmp_path):
    tensor = torch.arange(3_000_000)
    found = write(tmp_path / "x", {"t": tensor})
    assert found.sha256 == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert torch.equal(load_file(tmp_path / "x")["t"], tensor)


def test_tensors_that_were_read_can_be_changed_without_changing_the_file(tmp_path):
    write(tmp_path / "x", {"t": torch.ones(100_000)})
    before = (tmp_path / "x").read_bytes()
    read_tensors(tmp_path / "x")["t"].zero_()
    assert (tmp_path / "x").read_bytes() == before
