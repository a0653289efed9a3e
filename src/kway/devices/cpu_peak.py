"""What the processors can compute at most, from what the system says of their clock and instructions."""

from pathlib import Path

ROOT = Path("/")
# Bytes of a vector register, by the instructions that multiply and add in one; x86 cores have two such units at most.
VECTOR_BYTES = {"avx512f": 64, "fma": 32}
UNITS = 2


def flops_s(cores: int, root: Path = ROOT) -> dict[str, float]:
    """Return floating-point operations a second of ``cores`` cores at their highest clock, by dtype name.

    Cores times clock times two units times numbers a register times two for a multiply-add. Empty where the system does
    not tell clock or instructions, as in most virtual machines, and on other processors than x86.
    """
    try:
        clock = 1e3 * int((root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text())
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except (OSError, ValueError):
        return {}
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    width = next((size for name, size in VECTOR_BYTES.items() if name in flags), 0)
    if not width:
        return {}
    return {name: cores * clock * UNITS * 2 * width / size for name, size in (("fp64", 8), ("fp32", 4))}
