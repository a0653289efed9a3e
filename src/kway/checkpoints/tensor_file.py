"""One safetensors file: tensors by name, written in one pass, without a copy and mostly without the interpreter.

The library's own writer builds the whole file in memory first, or holds the interpreter while it writes, which a
training thread would notice. Reading is the library's. Dtypes that the format lacks lie there as pairs of reals or
as bytes, and the file's metadata names them.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kway.checkpoints.dtypes import AS_BYTES, NATIVE, PAIRED
from kway.checkpoints.durable import DurableFile
from kway.errors import UsageError
from kway.flat import flat

_PAIRS, _BYTES = "complex128", "bytes"
_ALIGN = 64  # bytes, so that numbers of every size can be read where they lie


def write_tensors(file: DurableFile, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write CPU tensors to an empty file. Raises ``OSError``, and ``UsageError`` for a name that cannot stand there.

    The bytes depend on names and tensors alone.
    """
    pairs: list[str] = []
    carried: dict[str, list[object]] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        check_name(name)
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if whole.dtype == PAIRED:
            pairs.append(name)
            whole = torch.view_as_real(whole)
        elif whole.dtype not in NATIVE:
            carried[name] = [str(whole.dtype).removeprefix("torch."), list(whole.shape)]
            whole = _bytes(whole)
        plain[name] = whole
    # Larger numbers first: then every tensor lies at a multiple of the size of its numbers.
    names = sorted(plain, key=lambda name: (-plain[name].element_size(), name))
    file.write(_header(names, plain, sorted(pairs), dict(sorted(carried.items()))))
    for name in names:
        if plain[name].numel():
            file.write(_bytes(plain[name]).numpy().data)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read what ``write_tensors`` wrote, or any safetensors file, as CPU tensors.

    Large files are mapped into memory, so ranks of one machine share the pages until they change them. Raises
    ``UsageError`` where the file is no safetensors file, and ``OSError``.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            read: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in json.loads(metadata.get(_PAIRS, "[]")):
            # A copy: other writers align numbers to 8 bytes, and torch reads these as if they were aligned to 16.
            read[name] = torch.view_as_complex(read[name].clone())
        for name, (dtype, shape) in json.loads(metadata.get(_BYTES, "{}")).items():
            read[name] = read[name].clone().view(AS_BYTES[dtype]).reshape(shape)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path} is not a safetensors file of kway ({reason})") from None
    return read


def check_name(name: object) -> None:
    """Raise ``UsageError`` where ``name`` cannot name a tensor in a file."""
    if not isinstance(name, str) or name == "__metadata__" or not _is_unicode(name):
        raise UsageError(f"{name!r} as the name of a tensor", "names are text, and not __metadata__")


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return flat(tensor).view(torch.uint8)


def _header(
    names: list[str], tensors: dict[str, torch.Tensor], pairs: list[str], carried: dict[str, list[object]]
) -> bytes:
    header: dict[str, object] = {}
    metadata = {key: json.dumps(value) for key, value in ((_PAIRS, pairs), (_BYTES, carried)) if value}
    if metadata:
        header["__metadata__"] = metadata
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NATIVE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
