"""What is in the code of a function: its text, the globals that it reads, and what it stores."""

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any


def code_text(code: CodeType) -> str:
    """Return the instructions of a code object with the names and constants in them, functions inside too."""
    return f"{code.co_code.hex()} {code.co_names} {constant(code.co_consts)}"


def constant(value: Any) -> str:
    """Write a constant of code. The order of a set is another one in each process."""
    if isinstance(value, CodeType):
        return code_text(value)
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(constant, value)))}}}"
    return f"({', '.join(map(constant, value))})" if isinstance(value, tuple) else repr(value)


def names_in(code: CodeType) -> set[str]:
    """Return all names of globals and attributes in a code object."""
    return {name for each in _all(code) for name in each.co_names}


def global_names(code: CodeType) -> list[str]:
    """Return the names of the globals that a code object reads, but for those that it writes: these are state."""
    read, written = set(), set()
    for each in _all(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(instruction.argval)
            elif instruction.opname == "STORE_GLOBAL":
                written.add(instruction.argval)
    return sorted(read - written)


def stored_names(code: CodeType) -> set[str]:
    """Return the names of the attributes that a code object stores."""
    return {
        instruction.argval
        for each in _all(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname == "STORE_ATTR"
    }


def _all(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _all(each)
