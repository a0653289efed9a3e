"""Seeds by arithmetic: who draws is decided by names and numbers, never by which process draws first."""

from hashlib import blake2b

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd


def _mix(value: int) -> int:
    """Scramble 64 bits: the finaliser of splitmix64, a bijection."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(*parts: int | str) -> int:
    """Mix integers and strings into one seed, from 0 to 2^63 - 1.

    The result is fixed for ever: the same on each platform and in each version. A state of 64 bits starts at
    zero; each part (an integer modulo 2^64; of a string, its BLAKE2b hash of 8 bytes, little-endian) is
    scrambled, added together with a constant stride, and the state is scrambled again. The lowest bit is
    dropped at the end. The order of the parts counts: ``key(1, 2) != key(2, 1)``.
    """
    state = 0
    for part in parts:
        if isinstance(part, str):
            number = int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "little")
        else:
            number = int(part) & _MASK
        state = _mix((state + _STRIDE + _mix((number + _STRIDE) & _MASK)) & _MASK)
    return state >> 1
