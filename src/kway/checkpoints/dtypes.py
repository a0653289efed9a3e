"""Which dtypes a checkpoint holds, and how each lies in a safetensors file."""

import torch

# Names that the format has, and that every version of the library that kway accepts can read.
NATIVE: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# The format has none for these: the real and the imaginary part of one, and the plain bytes of the others.
PAIRED = torch.complex128
AS_BYTES: dict[str, torch.dtype] = {
    "complex32": torch.complex32,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float4_e2m1fn_x2": torch.float4_e2m1fn_x2,
}
STORED_DTYPES = frozenset({*NATIVE, PAIRED, *AS_BYTES.values()})
