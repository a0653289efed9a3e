"""The form of plain data: which fields there are and what each holds; and what is wrong with data of another form.

Records come from files, and a file may hold anything. A form says all that a reader takes for granted, so that what is
not of it is refused when it is read, and by its name, and no reader meets it. A form is one of:

* an annotation: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Any``, unions of them, ``list[...]`` and
  ``dict[str, ...]``. A whole number is a ``float``, too; a truth value is no number; numbers are finite
  and of sizes that can be;
* ``AtLeast``, a number from a bound on; ``OneOf``, one of some texts;
* a dict: a table with at least these fields, each of its form (``Maybe``: of it where it is there); with the key
  ``str`` a table by any names, all of whose values are of that form;
* a list of one form: a list of what is of that form;
* a tuple: any of these forms. What is wrong is said of the first.
"""

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from kway.units import shown

# No time, size or rate is beyond it, and products of a few such numbers are finite.
_LARGEST = 1e30
_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "nothing",
          list: "a list", dict: "a table of fields"}  # fmt: skip


@dataclass(frozen=True)
class AtLeast:
    """A finite number not below ``least``, nor ``least`` itself where it must be ``above``; whole, where ``kind`` is
    ``int``.
    """

    least: float
    kind: type = float
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether the number is large enough."""
        return value > self.least if self.above else value >= self.least


@dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Maybe:
    """A field of this form, which a table may lack."""

    form: Any


def fits(value: Any, form: Any) -> bool:
    """Whether a value is of a form."""
    if isinstance(form, tuple | UnionType):
        return any(fits(value, each) for each in _any_of(form))
    kind = _kind(form)
    if kind is Any or not _is_a(value, kind):
        return kind is Any
    if isinstance(form, AtLeast):
        return form.holds(value)
    if isinstance(form, OneOf):
        return value in form.values
    if kind is dict and isinstance(form, dict) and str not in form:
        return all(
            fits(value[name], _form_of(of)) if name in value else isinstance(of, Maybe)
            for name, of in form.items()
        )
    if kind is dict:
        of = _inner(form)
        return all(isinstance(name, str) and fits(each, of) for name, each in value.items())
    return kind is not list or all(fits(each, _inner(form)) for each in value)


def wrong(value: Any, form: Any, name: str = "", within: str = "") -> str:
    """Say in a line what of ``value`` is not of ``form`` and where that is, or ``""``.

    ``name``: what the value is called, ``within``: what holds it, for the line:
    ``layers[0].forward: fixed_s is 'x', not a number``.
    """
    if fits(value, form):
        return ""
    forms = _any_of(form)
    # Of several that a value may be: what is wrong inside of the first that is such a container.
    inside = [each for each in forms if _kind(each) in (list, dict) and isinstance(value, _kind(each))]
    if not inside:
        need = " or ".join(dict.fromkeys(map(_named, forms)))
        if _is_number(value) and any(_kind(each) in (int, float) for each in forms) and not _can_be(value):
            need = f"a finite number up to {_LARGEST:g}"
        return _is(value, need, name or "it", within)
    if isinstance(value, list):
        of, name = _inner(inside[0]), name or "it"
        return next(
            problem
            for place, each in enumerate(value)
            if (problem := wrong(each, of, f"{name}[{place}]", within))
        )
    return _wrong_table(value, inside[0], f"{within}.{name}" if within else name)


def _wrong_table(value: dict[Any, Any], form: Any, inner: str) -> str:
    if isinstance(form, dict) and str not in form:
        for name, of in form.items():
            if name not in value and not isinstance(of, Maybe):
                return _said(f"{name} is missing", inner)
            problem = wrong(value[name], _form_of(of), name, inner) if name in value else ""
            if problem:
                return problem
        return ""
    for name, each in value.items():
        if not isinstance(name, str):
            return _is(name, _NAMES[str], "a name in it", inner)
        problem = wrong(each, _inner(form), name, inner)
        if problem:
            return problem
    return ""


def _any_of(form: Any) -> tuple[Any, ...]:
    if isinstance(form, tuple):
        return form
    return get_args(form) if isinstance(form, UnionType) else (form,)


def _kind(form: Any) -> Any:
    """Return the type that a value of ``form`` has."""
    if form is None:
        return NoneType
    if isinstance(form, AtLeast):
        return form.kind
    if isinstance(form, OneOf):
        return str
    return type(form) if isinstance(form, dict | list) else get_origin(form) or form


def _form_of(field: Any) -> Any:
    return field.form if isinstance(field, Maybe) else field


def _inner(form: Any) -> Any:
    """Return the form of what a list, or a table by any names, holds."""
    if isinstance(form, list):
        return form[0]
    return form[str] if isinstance(form, dict) else (get_args(form) or (Any,))[-1]


def _is_a(value: Any, kind: Any) -> bool:
    if kind is int or kind is float:
        return _is_number(value) and (kind is float or isinstance(value, int)) and _can_be(value)
    return isinstance(value, kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _can_be(number: float) -> bool:
    return -_LARGEST <= number <= _LARGEST


def _named(form: Any) -> str:
    """Say what is wanted."""
    if isinstance(form, OneOf):
        return f"one of {', '.join(form.values)}"
    name = _NAMES[_kind(form)]
    if isinstance(form, AtLeast):
        name += f"{' above' if form.above else ' of at least'} {form.least:g}"
    return name


def _is(value: Any, need: str, name: str, within: str) -> str:
    # What a container holds does not matter where there should be none.
    got = f"a {type(value).__name__}" if isinstance(value, list | tuple | dict) else shown(value)
    return _said(f"{name} is {got}, not {need}", within)


def _said(text: str, within: str) -> str:
    return f"{within}: {text}" if within else text
